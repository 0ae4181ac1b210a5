#!/usr/bin/env bash
# The small client: the wheel without its extras, in an environment of its own and an empty folder. Prints packages and
# megabytes, and what each verb does there; ends 0 if all are as the README says.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3.11}
most_packages=31 most_mb=65
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wrong=0
row() { printf '%-34s %s\n' "$1" "$2"; }
check() { if "${@:2}" >/dev/null 2>"$folder/said"; then row "$1" yes; else row "$1" "NO: $(tail -1 "$folder/said")"; wrong=1; fi; }

git -C "$checkout" archive HEAD | tar x -C "$(mkdir -p "$folder/sources" && echo "$folder/sources")"
"$python" -m venv "$folder/venv"
bin=$folder/venv/bin
before=$(du -sm "$folder/venv" | cut -f1)
"$bin/pip" install --quiet "$folder/sources"
packages=$("$bin/pip" list --format freeze | grep -vcE '^(pip|setuptools)=')
mb=$(($(du -sm "$folder/venv" | cut -f1) - before))
row packages "$packages (at most $most_packages)"
row megabytes "$mb (at most $most_mb)"
[ "$packages" -le $most_packages ] && [ "$mb" -le $most_mb ] || wrong=1
check "no torch, no tokenizers" bash -c "! ls -d '$folder'/venv/lib/python*/site-packages/{torch,tokenizers} 2>/dev/null"

mkdir "$folder/empty" && cd "$folder/empty"
loop() { env -i PATH=/usr/bin:/bin HOME="$folder/empty" "$bin/loop" "$@"; }
mkdir -p runs/demo/node/collections
echo '{"iteration": 1, "reward": 0.5}' >runs/demo/metrics.jsonl
check "loop init" loop init my_game
check "loop try" loop try my_game.py
check "loop doctor" loop doctor runs/demo
PYTHONPATH=$checkout/tests "$bin/python" - <<'END'
from pathlib import Path

from support.rollouts import rollout, turn

words = ["system", "the task", "my answer"]
messages = [{"role": role, "content": text} for role, text in zip(["system", "user", "assistant"], words)]
made = rollout([5, 6, 7, 8], [turn(2, 4, message=2)], messages=messages)
Path("runs/demo/node/collections/c.jsonl").write_text(made.to_json() + "\n")
END
check "loop view --text" loop view runs/demo --text
check "loop view --export" loop view runs/demo --export demo.html
check "the node's client" "$bin/python" -c "import rollout_server.client, agent_environments.protocol"
said=$(loop train my_game.py 2>&1 || true)
row "loop train" "$said"
[[ $said == *"pip install 'torchtune-loop[train]'"* && $(wc -l <<<"$said") = 1 ]] || wrong=1
seconds=$( { time -p loop try my_game.py >/dev/null; } 2>&1 | awk '/user|sys/ {s += $2} END {print s}')
row "loop try, CPU seconds" "$seconds"
exit $wrong
