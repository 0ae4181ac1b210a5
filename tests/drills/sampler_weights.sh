#!/usr/bin/env bash
# Plays five public reports of samplers that had other weights than their trainers, and prints the line that each ends
# in (docs/sampler_weights.md). Ends 0 if all are as the page says.
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/python -m pytest -q -rP -W ignore -p no:xdist tests/rollout_server/test_sampler_weights.py |
    grep -E "^(REPORT|FAILED|ERROR|E  )|(passed|failed) in"
