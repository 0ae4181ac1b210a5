"""Mistral (7B, Nemo): the plain decoder. The first 7B, and what was made of it, has a sliding window.

Its folders also hold the weights in a format of its own, which vLLM would take.
"""

from __future__ import annotations

from model_families.families.family import Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    positions=131_072,
    window=4096,
    vllm_args=("--config-format", "hf", "--tokenizer-mode", "hf"),
)
