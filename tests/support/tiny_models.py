"""Small random models of every kind that transformers builds here, by transformers' own config classes.

Their weights are large enough that each layer moves the logits: what a wrong mask changes is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

WORDS, WINDOW = 97, 24
PLAIN: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"sliding_window": WINDOW},
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {**WINDOWED, "query_pre_attn_scalar": 16},
    "gemma4_text": {
        **WINDOWED,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": WORDS,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 5.0,
    },
    "olmo2": {},
    "olmo3": WINDOWED,
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "ministral3": {},
    "seed_oss": {},
    "exaone4": WINDOWED,
    "hunyuan_v1_dense": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "layers_block_type": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "logits_scaling": 4.0,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
}
"""``model_type`` -> what its config has beside :data:`PLAIN`."""
SEVERAL: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models of text and pictures: ``model_type`` -> that of their text."""


def config_of(kind: str) -> Any:
    """The config of a small model of the kind ``kind``."""
    if kind in SEVERAL:
        return AutoConfig.for_model(kind, text_config=PLAIN | KINDS[SEVERAL[kind]], vision_config=_small_tower(kind))
    return AutoConfig.for_model(kind, **(PLAIN | KINDS[kind]))


def _small_tower(kind: str) -> Mapping[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"image_size": 16, "patch_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": PLAIN["hidden_size"]}
    return sizes


def random_model(kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model of the kind with random weights."""
    torch.manual_seed(seed)
    config = config_of(kind)
    auto = AutoModelForImageTextToText if kind in SEVERAL else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0.0, 0.5 if "embed" in name else 1.2 * parameter.shape[-1] ** -0.5)
            elif name.endswith((".bias", "sinks", "dt_bias")):
                parameter.normal_(0.0, 0.5)
    return model


def write_random(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a random model of the kind as transformers writes it."""
    random_model(kind, seed).save_pretrained(folder)
    return folder
