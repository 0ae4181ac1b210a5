#!/usr/bin/env bash
# Runs a command that changes a folder of this checkout, when no other make is doing so.
#
#   bash requirements/one_at_a_time.sh FOLDER COMMAND...
#
# The lock is a link FOLDER.lock to the number of the process that holds it, which is made in one step and read in one
# step. Linux and macOS have all that is needed. One whose process is gone is taken away.
set -u
folder=$1 lock=$1.lock said=
shift
until ln -sn "$$" "$lock" 2>/dev/null; do
    holder=$(readlink "$lock") || {
        [ -e "$lock" ] || [ -w . ] || { echo "error: $PWD cannot be written to" >&2; exit 1; }
        continue
    }
    if ! [ -d "/proc/$holder" ] && ! kill -0 "$holder" 2>/dev/null; then
        [ "$(readlink "$lock")" = "$holder" ] && rm -f "$lock"
        continue
    fi
    [ -n "$said" ] || echo "==> waiting for another make, process $holder, which is at work on $folder" >&2
    said=1
    sleep 1
done
trap 'rm -f "$lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$@"
