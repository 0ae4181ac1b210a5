#!/usr/bin/env bash
# Times `make demo` in a fresh clone of this checkout's last commit, and prints what its report says.
#
#   benchmarks/demo.sh [SEED...]        (0 1 2)
#
# For each seed: a new clone, `make demo`, and one line with clock, CPU seconds and the load before and after, then the
# lines of the iterations and the report of the evaluation. Packages come from uv's cache, so run `make setup` somewhere
# before. The clones are left in $TMPDIR. Run it on a machine where nothing else runs.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
load() { cut -d' ' -f1 /proc/loadavg; }
[ $# -gt 0 ] || set -- 0 1 2
for seed in "$@"; do
  clone=$(mktemp -d -t "demo-$seed-XXXXXX")
  git clone --quiet "$checkout" "$clone"
  before=$(load)
  status=0
  { time -p make -C "$clone" demo "SEED=$seed" >"$clone/demo.log" 2>&1; } 2>"$clone/time" || status=$?
  read -r clock user system <<<"$(awk '{print $2}' "$clone/time" | tr '\n' ' ')"
  echo "seed $seed: ended with $status; $clock s by the clock, CPU $user + $system s; load $before, then $(load); $clone"
  [ "$status" = 0 ] || { tail -20 "$clone/demo.log"; exit 1; }
  grep -E "this takes about|^iteration .* reward" "$clone/demo.log"
  cat "$clone/runs/demo/evaluation/report.md"
done
