#!/usr/bin/env bash
# One would guess: msgspec.json.decode reads every line that the standard library's json.dumps wrote and json.loads reads.
# So it is: it refuses half a surrogate pair (a text of a model that a limit cut in an emoji), also in a skipped field.
# See recipes/loop_viewer/summaries.py. msgspec 0.22.0, Python 3.11, on a CPU; 28 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone msgspec==0.22.0 << 'END'
import json
import msgspec
class Row(msgspec.Struct):
    reward: float
def read(text):
    line = json.dumps({"reward": 1.0, "text": text})
    assert json.loads(line)["text"] == text
    try:
        return msgspec.json.decode(line, type=Row).reward
    except msgspec.DecodeError as error:
        return str(error).split(" (")[0]
seen = {
    "a whole pair": read("\U0001f600"),
    "half a pair": read("cut \ud83d, and more words"),
    "converted from what json read": msgspec.convert(json.loads('{"reward": 1.0, "text": "\\ud83d"}'), Row).reward,
}
expected = {"a whole pair": 1.0, "half a pair": "JSON is malformed: unexpected end of hex escape", "converted from what json read": 1.0}
END
