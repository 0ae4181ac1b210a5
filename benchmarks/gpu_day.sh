#!/usr/bin/env bash
# What is still to be seen on a GPU, for whoever has one for a quarter of an hour: at most thirteen minutes, the most
# valuable first, nothing to answer.
#
#   benchmarks/gpu_day.sh [FOLDER]         rows go to FOLDER/gpu_day.json (benchmarks/results)
#   benchmarks/gpu_day.sh --dry            the steps with their limits, without a GPU
#   VENV=/path/to/venv benchmarks/gpu_day.sh
#   python benchmarks/gpu.py --cpu-rehearsal      all steps with tiny shapes, without a GPU
#
# VENV is an environment that `make setup GPU=1` made; without it and without a .venv of the GPU's builds, that is run
# first, which needs PyPI and is not in the thirteen minutes. The steps are DAY in benchmarks/gpu.py. Each writes its rows
# as soon as it has them, with the device's name, so that one which its limit cuts short keeps them; a row `exit status`
# says how it ended (124: its limit). The same command goes on with what has not ended with 0. Models of published shapes
# are drawn into the temporary folder, some 30 GB. Ends with 1 where a step did not end well, or a wrong case was not
# refused.
set -uo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-$PWD/.venv}
if [ "${1:-}" = --dry ]; then exec "$venv/bin/python" benchmarks/gpu.py --day --dry; fi
[ -n "$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)" ] \
  || { echo "gpu_day: nvidia-smi finds no GPU; --dry shows the steps without one" >&2; exit 64; }
[ -n "${VENV:-}" ] || [ -e .venv/.installed-gpu ] || make setup GPU=1 || exit 1
[ -x "$venv/bin/python" ] || { echo "gpu_day: VENV=$venv holds no bin/python; name an environment of make setup GPU=1" >&2; exit 64; }
folder=${1:-benchmarks/results}
mkdir -p "$folder" || exit 1
export PATH=$venv/bin:$PATH
exec "$venv/bin/python" benchmarks/gpu.py --day --json "$folder/gpu_day.json"
