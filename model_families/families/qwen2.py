"""Qwen2 and Qwen2.5: biases at queries, keys and values."""

from __future__ import annotations

from model_families.families.family import Family

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    window=4096,
    windowed=False,
)
