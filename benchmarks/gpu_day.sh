#!/usr/bin/env bash
# What is still to be seen on a GPU, for whoever has one for a quarter of an hour: at most thirteen minutes, the most
# valuable first, nothing to answer.
#
#   benchmarks/gpu_day.sh [FOLDER]         rows go to FOLDER/gpu_day.json (benchmarks/results)
#   benchmarks/gpu_day.sh --dry            the steps with their limits, without a GPU
#   VENV=/path/to/venv benchmarks/gpu_day.sh
#
# VENV is an environment that `make setup GPU=1` made; without it and without a .venv of the GPU's builds, that is run
# first, which needs PyPI and is not in the thirteen minutes. A step that its limit cuts short keeps the rows that it has
# written. Each row has the device's name; a row `exit status` per step says how it ended (124: its limit). The same
# command goes on with what is missing. A step for something new is a line below, in the place of one that was seen.
set -uo pipefail
cd "$(dirname "$0")/.."

MOST_S=780
# Limit in seconds, name, words after the interpreter. ROWS stands for the file of the rows.
STEPS=(
  "60|heads with scale and cap equal full logits|-m pytest -q -n 0 -p no:cacheprovider tests/loop_recipes/engine/test_logprobs.py"
  "270|Qwen3-4B in turns and divided: start, publication, memory, swaps, gaps, tokens a second of both sides|benchmarks/share.py --json ROWS --turns 2 --prompt 3000"
  "160|one sequence of 16,384 tokens by the present kernels|benchmarks/gpu.py --json ROWS --parts published --only 16384"
  "60|packed rollouts and a resumed update in bf16|benchmarks/gpu.py --json ROWS --parts exactness"
  "150|two iterations of tiny_gpu|-m pytest -q -n 0 -p no:cacheprovider tests/integration/test_gpu_loop.py"
  "80|two rollouts of 32,000 tokens, 16 layers of the 32B shape|benchmarks/gpu.py --json ROWS --parts update --only 16.layers.*32000"
)

if [ "${1:-}" = --dry ]; then
  sum=0
  for step in "${STEPS[@]}"; do
    IFS='|' read -r limit name words <<<"$step"
    printf '%4d s  %s: python %s\n' "$limit" "$name" "$words"
    sum=$((sum + limit))
  done
  echo "$sum s of $MOST_S"
  [ "$sum" -le "$MOST_S" ]
  exit
fi

device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)
[ -n "$device" ] || { echo "gpu_day: nvidia-smi finds no GPU; --dry shows the steps without one" >&2; exit 64; }
if [ -z "${VENV:-}" ]; then
  [ -e .venv/.installed-gpu ] || make setup GPU=1 || exit 1
  VENV=$PWD/.venv
fi
[ -x "$VENV/bin/python" ] || { echo "gpu_day: VENV=$VENV holds no bin/python; name an environment of make setup GPU=1" >&2; exit 64; }
folder=${1:-benchmarks/results}
mkdir -p "$folder" || exit 1
rows=$(cd "$folder" && pwd)/gpu_day.json
export PATH=$VENV/bin:$PATH

# Whether step $1 has ended with 0 before.
seen() {
  "$VENV/bin/python" - "$rows" "$1, $device" <<'PYTHON'
import json, pathlib, sys
file, case = pathlib.Path(sys.argv[1]), sys.argv[2]
rows = json.loads(file.read_text()) if file.exists() else []
sys.exit(not any((row["case"], row["metric"], row["value"]) == (case, "exit status", 0) for row in rows))
PYTHON
}

# Writes rows of step $1, which ended with status $2 after $3 seconds, in place of those that it had.
record() {
  "$VENV/bin/python" - "$rows" "$1, $device" "$2" "$3" <<'PYTHON'
import json, pathlib, sys
file, (case, status, seconds) = pathlib.Path(sys.argv[1]), sys.argv[2:]
rows = [row for row in (json.loads(file.read_text()) if file.exists() else []) if row["case"] != case]
rows.append({"case": case, "metric": "exit status", "value": int(status), "unit": ""})
rows.append({"case": case, "metric": "seconds", "value": int(seconds), "unit": "s"})
partial = file.with_suffix(".partial")
partial.write_text(json.dumps(rows, indent=1) + "\n")
partial.replace(file)
PYTHON
}

began=$SECONDS
for step in "${STEPS[@]}"; do
  IFS='|' read -r limit name words <<<"$step"
  if seen "$name"; then echo "==> $name: seen before"; continue; fi
  left=$((MOST_S - (SECONDS - began)))
  [ "$left" -gt 10 ] || { echo "==> $name: no time left"; continue; }
  [ "$limit" -le "$left" ] || limit=$left
  echo "==> $name ($limit s at most)"
  started=$SECONDS
  read -ra command <<<"${words//ROWS/$rows}"
  timeout -k 10 "$limit" "$VENV/bin/python" "${command[@]}" </dev/null
  status=$?
  record "$name" "$status" "$((SECONDS - started))"
done
echo "==> rows: $rows"
