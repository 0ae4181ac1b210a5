#!/usr/bin/env bash
# All attacks (`pytest -m attack`), as root and as an ordinary user, whom rights of files bind: tests/drills/attacks.sh
# WORDS, which go to pytest. As an ordinary user oneself, as that one alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
nobody=65534
run() {  # a command before pytest
    local folder
    folder=$(mktemp -d)
    if [[ $1 != env ]]; then chown "$nobody:$nobody" "$folder"; fi
    "$@" HOME="$folder" TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1 \
        .venv/bin/python -m pytest -p no:cacheprovider -q -m attack --basetemp "$folder/tests" "${words[@]}"
}
words=("$@")
if [[ ${AS_NOBODY:-} ]]; then
    as_nobody=(setpriv "--reuid=$nobody" "--regid=$nobody" --clear-groups)
    if ! "${as_nobody[@]}" env .venv/bin/python -c pass 2>&-; then  # the interpreter lies in the home of root: show it alone
        prefix=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
        shown=$(mktemp -d)
        mount --bind "$prefix" "$shown"
        mount -t tmpfs -o mode=755 tmpfs "/${prefix:1:$(expr index "${prefix:1}" /)}"
        mkdir -p "$prefix"
        mount --bind "$shown" "$prefix"
    fi
    run "${as_nobody[@]}" env
    exit
fi
failed=0
run env || failed=1
if [[ $(id -u) == 0 ]]; then
    AS_NOBODY=1 unshare --mount "$0" "${words[@]}" || failed=1
fi
exit "$failed"
