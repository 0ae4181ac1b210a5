"""Published models of the families: the parts of their config.json that make the decoder, in its own spelling.

A job is planned by them before its weights are fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_families.base_model import FAMILIES, BaseModel

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


def published_model(path: str | Path) -> BaseModel | None:
    """The published model that a folder, or a name on the hub, is called after; None where none is known here."""
    name = Path(str(path).partition("@")[0]).name
    config = PUBLISHED.get(name) or PUBLISHED.get(name.removesuffix("-Instruct"))
    return None if config is None else BaseModel.of_family(config, FAMILIES[config["architectures"][0]])
