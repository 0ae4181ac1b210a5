#!/usr/bin/env bash
# One would guess: a config.json with rope_parameters, to which rope_scaling is added as models' cards say, has both.
# So it is: rope_scaling takes the place of all rope_parameters, and rope_theta falls to 10000.
# See model_families/families/family.py. transformers 5.23.0, and 5.19.0 alike; 27 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone transformers==5.23.0 << 'END'
import json
import pathlib, tempfile
from transformers import AutoConfig
def rope(**keys):
    folder = tempfile.mkdtemp()
    config = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, **keys}
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(folder).rope_parameters
    return [read["rope_type"], read["rope_theta"]]
plain = {"rope_theta": 1e6, "rope_type": "default"}
yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
seen = {
    "rope_parameters": rope(rope_parameters=plain),
    "rope_theta and rope_scaling": rope(rope_theta=1e6, rope_scaling=yarn),
    "rope_parameters and rope_scaling": rope(rope_parameters=plain, rope_scaling=yarn),
}
expected = {
    "rope_parameters": ["default", 1e6],
    "rope_theta and rope_scaling": ["yarn", 1e6],
    "rope_parameters and rope_scaling": ["yarn", 1e4],
}
END
