#!/usr/bin/env bash
# One would guess: two texts in one row with positions that begin again (as packing collators write them) stay apart.
# So it is: convolutions, delta nets and gpt-oss's windows go on from one text into the next, and nothing says so.
# See recipes/loop_recipes/engine/general_decoder.py. torch 2.13.0 and transformers 5.23.0, on a CPU; 28 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone torch==2.13.0 transformers==5.23.0 << 'END'
import logging, os
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from transformers import AutoConfig, AutoModelForCausalLM
plain = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
plain |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
kinds = {
    "qwen3": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], **delta},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
def apart(kind):
    """Whether the second text has the same logits behind the first as alone."""
    torch.manual_seed(0)
    implementation = "eager" if kind == "gpt_oss" else "sdpa"
    config = AutoConfig.for_model(kind, **plain, **kinds[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    first, second = torch.randint(1, 97, (1, 9)), torch.randint(1, 97, (1, 7))
    row = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(input_ids=row, position_ids=positions, use_cache=False).logits[0, 9:]
        alone = model(input_ids=second, use_cache=False).logits[0]
    return bool((packed.log_softmax(-1) - alone.log_softmax(-1)).abs().max() < 1e-3)
seen = {kind: apart(kind) for kind in kinds}
expected = {"qwen3": True, "lfm2": False, "qwen3_5_text": False, "gpt_oss": False}
END
