"""Small runs of the LOOP recipe for tests: a random policy, its model section, stored rollouts, a whole config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import random_policy
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune


def model_section(folder: Path, tied: bool = True) -> dict[str, Any]:
    """The recipe's ``model`` section for :func:`random_policy.write_model`'s policy."""
    return {
        "_component_": "torchtune.models.qwen2.lora_qwen2",
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "vocab_size": base_weights(folder, tied)["tok_embeddings.weight"].shape[0],
        "num_layers": random_policy.LAYERS,
        "num_heads": random_policy.HEADS,
        "num_kv_heads": random_policy.KV_HEADS,
        "embed_dim": random_policy.WIDTH,
        "intermediate_dim": random_policy.FEED_FORWARD,
        "max_seq_len": 4096,
        "norm_eps": 1e-6,
        "rope_base": 10_000.0,
        "tie_word_embeddings": tied,
        "lora_rank": 8,
        "lora_alpha": 16,
    }


def base_weights(folder: Path, tied: bool = True) -> dict[str, Tensor]:
    """The policy's weights by their torchtune names."""
    weights = load_file(folder / "model.safetensors")
    return qwen2_hf_to_tune(weights, num_heads=4, num_kv_heads=2, dim=64, tie_word_embeddings=tied)


def random_adapter(shapes: dict[str, Tensor], seed: int, scale: float = 0.05) -> dict[str, Tensor]:
    """Normal noise of these shapes, so that B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=generator) * scale for name, tensor in shapes.items()}
