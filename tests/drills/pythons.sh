#!/usr/bin/env bash
# Drill: the trainer on the Pythons that pyproject.toml names, with the newest packages of its ranges; its node is on 3.11.
#
#     bash tests/drills/pythons.sh          # 3.12 and 3.13; or those named, by version or path
#
# Prints what was tried with what; ends with 0 if all of it passed. LOGS=FOLDER keeps the output of what failed.
. "$(dirname "$0")/trainer_set.sh"
[ $# -gt 0 ] || set -- 3.12 3.13
for python; do
  if ! path=$("$uv" python find "$python" 2>/dev/null); then
    echo "Python $python is not here: give the path of one"
    wrong=1
    continue
  fi
  version=$("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  try_set "$version" "$python" highest
done
exit $wrong
