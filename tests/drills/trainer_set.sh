# Sourced by ranges.sh and pythons.sh: a set of packages that pyproject.toml allows, installed as a trainer's environment
# and tried. The node, and the vLLM that it starts, are those of NODE, this checkout's environment of Python 3.11.
#
# Each set takes 6 GB of disk, for PyPI's torch is the CUDA build, which runs on a CPU too.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
uv=$(command -v uv || echo "$checkout/.uv/bin/uv")
NODE=${NODE:-$checkout/.venv/bin}
# What is computed by torch and transformers against a second way of computing it.
EXACT="tests/loop_recipes/engine/test_logprobs.py tests/loop_recipes/engine/test_general_decoder.py
  tests/loop_recipes/engine/test_shared_prefixes.py tests/loop_recipes/engine/test_peft_export.py"
QUICK="not slow and not integration and not slurm and not drill"
SHOWN="torch torchao peft transformers huggingface-hub omegaconf jinja2"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} ROLLOUT_SERVER_TOKEN=$RANDOM$RANDOM$RANDOM
unset PYTHONPATH
wrong=0
[ -z "${LOGS:-}" ] || mkdir -p "$LOGS"
row() { printf '%-10s %-22s %s\n' "$set" "$1" "$2"; }

# What a log comes to: pytest's count or the update's gap to the sampler, else the last line.
result() { grep -E '^[0-9]+ (passed|failed)|^iteration .* gap ' "$1" | tail -1 | grep . || tail -1 "$1"; }

# check NAME COMMAND...: a row with what its output comes to, which is kept in LOGS if it failed.
check() {
  local log=$folder/$set.${1// /_}.log
  if (cd "$place" && "${@:2}") >"$log" 2>&1; then
    row "$1" "yes  $(result "$log")"
  else
    row "$1" "NO   $(result "$log")"
    wrong=1
    [ -z "${LOGS:-}" ] || cp "$log" "$LOGS"
  fi
}

# install PYTHON RESOLUTION: an environment with the lowest or the newest of each range, and this checkout's wheel.
install() {
  local wanted=$place/wanted.txt
  "$uv" venv --quiet --python "$1" "$place/venv"
  (cd "$checkout" && "$uv" pip compile --quiet --no-header --no-annotate --python "$bin/python" --resolution "$2" \
    --extra train pyproject.toml -o "$wanted")
  local tools
  tools=$(sed -n '/^dev = \[/,/^]/s/^ *"\(.*\)",$/\1/p' "$checkout/pyproject.toml" | grep -E '^(pytest|hypothesis|qwen|renderers)')
  "$uv" pip install --quiet --python "$bin/python" -r "$wanted" $tools compressed-tensors
  git -C "$checkout" archive HEAD | tar x -C "$(mkdir -p "$place/sources" && echo "$place/sources")"
  "$uv" build --quiet --wheel --python "$bin/python" --out-dir "$place/dist" "$place/sources"
  "$uv" pip install --quiet --python "$bin/python" --no-deps "$place"/dist/*.whl
}

tests() { cd "$checkout" && "$bin/python" -m pytest -q -p no:xdist -p no:cacheprovider --without-contrib "$@"; }

# Two iterations and the scores before and after, with a node of NODE beside it.
train() {
  local port model node ended=0
  cp "$checkout/benchmarks/task_files/even.py" .
  port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  model=$("$bin/python" -c 'from loop_recipes.paths import loop_package; print(loop_package("tiny_policy"))')
  "$bin/loop" train even.py --model "$model" output_dir=runs/even max_iterations=2 collection.tasks_per_iteration=4 \
    rollout_node.launch=False rollout_node.url="http://127.0.0.1:$port" &
  local trainer=$!
  until [ -s runs/even/train.yaml ]; do kill -0 $trainer && sleep 1; done
  "$NODE/loop" node runs/even/train.yaml output_dir=node -- port="$port" >node.log 2>&1 &
  node=$!
  wait $trainer || ended=$?
  kill $node
  wait $node || true
  return $ended
}

# try_set NAME PYTHON RESOLUTION
try_set() {
  set=$1 place=$folder/$1 bin=$folder/$1/venv/bin
  mkdir "$place"
  check "installed" install "$2" "$3"
  [ -x "$bin/loop" ] || return 0
  row "Python" "$("$bin/python" -V | cut -d' ' -f2)"
  row "packages" "$("$uv" pip freeze --python "$bin/python" 2>/dev/null | grep -E "^(${SHOWN// /|})==" | tr '\n' ' ')"
  # Those of `make quick`, without its bound on seconds, which is for the packages of requirements/.
  check "unit tests, pure" tests -m "$QUICK" $(cd "$checkout" && make -pn | sed -n 's/^QUICK_pure := //p')
  check "unit tests, torch" tests -m "$QUICK" $(cd "$checkout" && make -pn | sed -n 's/^QUICK_torch := //p')
  check "exactness" tests $EXACT
  check "loop try" "$bin/loop" try "$checkout/examples/quest.py"
  check "loop train" train
  rm -rf "$place"
}
