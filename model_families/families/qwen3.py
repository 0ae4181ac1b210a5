"""Qwen3, dense (0.6B to 32B, those of July 2025 included): queries and keys are normalised, heads are 128 wide."""

from __future__ import annotations

from model_families.families.family import Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    head_width=128,
    window=4096,
    windowed=False,
    required={"attention_bias": (False, None)},
)
