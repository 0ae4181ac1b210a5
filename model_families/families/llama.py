"""Llama 2 to 3.3, and what is built like it, as SmolLM2: the plain decoder; from 3.1 on its positions are scaled."""

from __future__ import annotations

from model_families.families.family import Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    positions=2048,
    required={"attention_bias": (False, None)},
)
