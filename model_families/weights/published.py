"""Published models of the families: the parts of their config.json that make the decoder, in its own spelling.

A job is planned by them before its weights are fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN2 |= {"max_position_embeddings": 32_768, "use_sliding_window": False, "sliding_window": 131_072}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
QWEN3 |= {"max_position_embeddings": 40_960, "sliding_window": None, "attention_bias": False}
LATER_QWEN3 = {**QWEN3, "rope_theta": 5e6, "max_position_embeddings": 262_144}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-5}
LLAMA |= {"max_position_embeddings": 131_072, "attention_bias": False, "mlp_bias": False}
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}
LLAMA_8 = {**LLAMA, "rope_scaling": {**SCALED, "factor": 8.0}}
LLAMA_32 = {**LLAMA, "rope_scaling": {**SCALED, "factor": 32.0}}
SMOL = {**LLAMA, "rope_theta": 1e5, "max_position_embeddings": 8192}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1e6, "rms_norm_eps": 1e-5}
MISTRAL |= {"max_position_embeddings": 32_768, "sliding_window": None}


def sizes(width: int, inner: int, layers: int, heads: int, keys: int, words: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": words,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": QWEN2 | sizes(896, 4864, 24, 14, 2, 151_936, True),
    "Qwen2.5-1.5B": QWEN2 | sizes(1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen2.5-3B": QWEN2 | sizes(2048, 11_008, 36, 16, 2, 151_936, True),
    "Qwen2.5-7B": QWEN2 | sizes(3584, 18_944, 28, 28, 4, 152_064, False),
    "Qwen2.5-14B": QWEN2 | sizes(5120, 13_824, 48, 40, 8, 152_064, False),
    "Qwen2.5-32B": QWEN2 | sizes(5120, 27_648, 64, 40, 8, 152_064, False),
    "Qwen2.5-72B": QWEN2 | sizes(8192, 29_568, 80, 64, 8, 152_064, False),
    "Qwen3-0.6B": QWEN3 | sizes(1024, 3072, 28, 16, 8, 151_936, True),
    "Qwen3-1.7B": QWEN3 | sizes(2048, 6144, 28, 16, 8, 151_936, True),
    "Qwen3-4B": QWEN3 | sizes(2560, 9728, 36, 32, 8, 151_936, True),
    "Qwen3-4B-Instruct-2507": LATER_QWEN3 | sizes(2560, 9728, 36, 32, 8, 151_936, True),
    "Qwen3-8B": QWEN3 | sizes(4096, 12_288, 36, 32, 8, 151_936, False),
    "Qwen3-14B": QWEN3 | sizes(5120, 17_408, 40, 40, 8, 151_936, False),
    "Qwen3-32B": QWEN3 | sizes(5120, 25_600, 64, 64, 8, 151_936, False),
    "Llama-3.1-8B": LLAMA_8 | sizes(4096, 14_336, 32, 32, 8, 128_256, False),
    "Llama-3.3-70B": LLAMA_8 | sizes(8192, 28_672, 80, 64, 8, 128_256, False),
    "Llama-3.2-1B": LLAMA_32 | {"head_dim": 64} | sizes(2048, 8192, 16, 32, 8, 128_256, True),
    "Llama-3.2-3B": LLAMA_32 | {"head_dim": 128} | sizes(3072, 8192, 28, 24, 8, 128_256, True),
    "SmolLM2-135M": SMOL | sizes(576, 1536, 30, 9, 3, 49_152, True),
    "SmolLM2-360M": SMOL | sizes(960, 2560, 32, 15, 5, 49_152, True),
    "SmolLM2-1.7B": SMOL | {"rope_theta": 130_000.0} | sizes(2048, 8192, 24, 32, 32, 49_152, True),
    "Mistral-7B-v0.3": MISTRAL | sizes(4096, 14_336, 32, 32, 8, 32_768, False),
    "Mistral-Nemo-2407": MISTRAL | {"head_dim": 128} | sizes(5120, 14_336, 40, 32, 8, 131_072, False),
}
"""By name, without an ``-Instruct`` behind it."""

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    **sizes(2048, 6144, 48, 32, 4, 151_936, False),
}
LATER_QWEN3_30B = {**QWEN3_30B, "rope_theta": 1e7, "max_position_embeddings": 262_144}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
WINDOWS = ["sliding_attention", "full_attention"]
PUBLISHED_GENERAL: dict[str, dict[str, Any]] = {
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "rope_theta": 5e6,
        "max_position_embeddings": 65_536,
        **sizes(2048, 11_008, 36, 16, 4, 128_256, True),
    },
    "Qwen3.5-4B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 262_144,
            **sizes(2560, 9216, 32, 16, 4, 248_320, True),
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
        },
    },
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-30B-A3B-Instruct-2507": LATER_QWEN3_30B,
    "Qwen3-30B-A3B-Thinking-2507": LATER_QWEN3_30B,
    "Qwen3-Coder-30B-A3B": LATER_QWEN3_30B,
    "gpt-oss-20b": {**GPT_OSS, "num_local_experts": 32, "layer_types": WINDOWS * 12}
    | sizes(2880, 2880, 24, 64, 8, 201_088, False),
    "gpt-oss-120b": {**GPT_OSS, "num_local_experts": 128, "layer_types": WINDOWS * 18}
    | sizes(2880, 2880, 36, 64, 8, 201_088, False),
}
"""The same of models that transformers builds."""

HUB = {"qwen": "Qwen", "smollm": "HuggingFaceTB", "llama": "meta-llama", "gpt-oss": "openai"}
"""Whose models of a name's beginning are on the hub."""


def published_config(path: str | Path) -> dict[str, Any] | None:
    """The config.json of the published model that a folder, or a name on the hub, is called after; None where none is
    known here."""
    name = Path(str(path).partition("@")[0]).name
    known = PUBLISHED | PUBLISHED_GENERAL
    return known.get(name) or known.get(name.removesuffix("-Instruct"))


def how_to_fetch(path: str | Path) -> str | None:
    """The command that fetches the published model that a folder is called after; None where none is known here."""
    name = Path(path).name
    owners = [owner for begin, owner in HUB.items() if name.lower().startswith(begin)]
    if published_config(path) is None or not owners:
        return None
    return f"tune download {owners[0]}/{name} --output-dir {path}"
