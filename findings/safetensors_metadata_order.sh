#!/usr/bin/env bash
# One would guess: the same tensors with the same metadata make the same file of safetensors.
# So it is: two words of metadata stand in one order or the other from call to call, so that files and digests differ.
# See recipes/loop_recipes/engine/peft_export.py. safetensors 0.8.0 and numpy 2.2.6; 28 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone safetensors==0.8.0 numpy==2.2.6 << 'END'
import numpy
from safetensors.numpy import save
tensors = {"a": numpy.zeros(2, dtype=numpy.float32)}
def files(metadata):
    return len({save(tensors, metadata=metadata) for _ in range(200)})
seen = {"no metadata": files(None), "one word": files({"format": "pt"}), "two words": files({"format": "pt", "base": "x"})}
expected = {"no metadata": 1, "one word": 1, "two words": 2}
END
