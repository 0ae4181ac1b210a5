#!/usr/bin/env bash
# One would guess: a short sequence has the same log-probs in a batch with a long one as alone (up to rounding).
# So it is, but for longrope (Phi-3, Phi-4): the longest row of a batch chooses the factors of all of them.
# See recipes/loop_recipes/engine/general_decoder.py. torch 2.13.0 and transformers 5.23.0, on a CPU; 29 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone torch==2.13.0 transformers==5.23.0 << 'END'
import os
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from transformers import AutoModelForCausalLM, Phi3Config
def difference(rope):
    """Between a sequence of 20 tokens alone and padded on the right beside one of 60, in nats."""
    torch.manual_seed(0)
    config = Phi3Config(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=512,
                        original_max_position_embeddings=32, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    long, short = torch.randint(1, 97, (1, 60)), torch.randint(1, 97, (1, 20))
    batch = torch.cat([long, torch.cat([short, torch.zeros(1, 40, dtype=torch.long)], 1)])
    mask = torch.ones_like(batch)
    mask[1, 20:] = 0
    with torch.no_grad():
        beside = model(input_ids=batch, attention_mask=mask, use_cache=False).logits[1, :20].log_softmax(-1)
        alone = model(input_ids=short, use_cache=False).logits[0].log_softmax(-1)
    return (beside - alone).abs().max().item()
longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
found = {"default": difference({"rope_type": "default", "rope_theta": 1e4}), "longrope": difference(longrope)}
print("  nats:", {name: f"{value:.1e}" for name, value in found.items()})
seen = {name: value < 1e-3 for name, value in found.items()}
expected = {"default": True, "longrope": False}
END
