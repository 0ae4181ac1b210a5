"""Rotary positions as Hugging Face computes them: a channel turns with the one half a head away, for every family.

torchtune's Llama and Mistral turn neighbours instead, and store queries and keys in another order for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings

from model_families.families.family import Rope


def frequencies(rope: Rope, head_width: int) -> Tensor:
    """Return the radians [head_width / 2] by which each pair of channels turns from one position to the next."""
    plain = 1.0 / (rope.base ** (torch.arange(0, head_width, 2).float() / head_width))
    match rope.kind:
        case "linear":
            return plain / rope.scaling["factor"]
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case _:
            return plain


def amplitude(rope: Rope) -> float:
    """Return the factor for cosines and sines. YaRN sharpens attention more for longer contexts."""
    return 0.1 * math.log(rope.scaling["factor"]) + 1.0 if rope.kind == "yarn" and rope.scaling["factor"] > 1 else 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide the frequencies of slow pairs by the factor and keep those of fast pairs, with a ramp in between."""
    low, high, factor = (rope.scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = rope.scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    left = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - left) * plain / factor + left * plain


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    """Slow the pairs with a ramp over the pair's number (arXiv 2309.00071)."""
    length, pairs = rope.scaling["original_max_position_embeddings"], len(plain)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(length / (times * 2 * math.pi)) / math.log(rope.base)

    first = max(math.floor(pair_that_turns(rope.scaling.get("beta_fast", 32.0))), 0)
    last = min(math.ceil(pair_that_turns(rope.scaling.get("beta_slow", 1.0))), 2 * pairs - 1)
    slowed = ((torch.arange(pairs).float() - first) / (max(last - first, 0.001))).clamp(0, 1)
    return slowed * plain / rope.scaling["factor"] + (1 - slowed) * plain


class ScaledRope(Qwen2RotaryPositionalEmbeddings):
    """torchtune's rotary positions with scaled frequencies; they pair channels of the two halves of a head."""

    def __init__(self, rope: Rope, head_width: int, positions: int) -> None:
        self.rope = rope
        super().__init__(head_width, positions, rope.base)

    def rope_init(self) -> None:
        self.register_buffer("theta", frequencies(self.rope, self.dim), persistent=False)
        self.build_rope_cache(self.max_seq_len)
        self.cache.mul_(amplitude(self.rope))


def turns_neighbours(rope: nn.Module | None) -> bool:
    """Return whether a decoder's rotary positions turn neighbouring channels, as torchtune's Llama does.

    Raises:
        ValueError: the decoder has an unknown kind of positions.
    """
    if isinstance(rope, Qwen2RotaryPositionalEmbeddings):
        return False
    if type(rope) not in (RotaryPositionalEmbeddings, Llama3ScaledRoPE):
        raise ValueError(
            f"attention with positions of {type(rope).__name__} cannot be exported to Hugging Face's order"
        )
    return True
