#!/usr/bin/env bash
# Drill: the lowest and the newest packages of the ranges in pyproject.toml, each in an environment of its own.
#
#     bash tests/drills/ranges.sh           # both; `lowest` or `highest`: that one; PYTHON=3.12: for another Python
#
# Prints what was tried with what; ends with 0 if all of it passed. LOGS=FOLDER keeps the output of what failed.
. "$(dirname "$0")/trainer_set.sh"
for resolution in "${@:-lowest highest}"; do
  for each in $resolution; do
    try_set "$each" "${PYTHON:-3.11}" "${each/lowest/lowest-direct}"
  done
done
exit $wrong
