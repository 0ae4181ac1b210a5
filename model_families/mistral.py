"""Mistral without a sliding window (7B from 0.2 on, Nemo): the plain decoder.

Its folders also hold the weights in a format of its own, which vLLM would take.
"""

from __future__ import annotations

from model_families.family import Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    chat="mistral",
    positions=131_072,
    required={"sliding_window": (None,)},
    vllm_args=("--config-format", "hf", "--load-format", "hf", "--tokenizer-mode", "hf"),
)
