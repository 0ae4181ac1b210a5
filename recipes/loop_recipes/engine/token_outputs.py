"""The outputs of every decoder here: the log-probs of given tokens in place of all logits."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.logprobs import Head

CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""The text that activation checkpointing puts into the names of a layer's parameters."""


class TokenOutputs(NamedTuple):
    """The outputs of a decoder for each of n sampled tokens.

    ``logprobs`` [n], fp32, with gradient; without gradient, and only if asked for, ``entropy`` [n] and ``hidden``
    [n, d], the normed last hidden states that a value function reads.
    """

    logprobs: Tensor
    entropy: Tensor | None
    hidden: Tensor | None


class _Answering(Protocol):
    """A decoder with a head, whose logits are multiplied by ``scale`` and, unless it is None, kept below ``cap``."""

    head: Head
    scale: float
    cap: float | None


def token_outputs(
    model: _Answering,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    own: Tensor | None,
    mask: Documents | Tensor | None,
    with_entropy: bool,
    with_hidden: bool,
) -> TokenOutputs:
    """Return the outputs from the last hidden states [m, d] and the output matrix ``weight`` [v, d]; the other
    arguments are those of :meth:`~loop_recipes.engine.decoder.LogProbDecoder.forward`."""
    logprobs = model.head(hidden, weight, targets if own is None else targets[own], model.scale, model.cap)
    entropy = model.head.entropy(hidden, weight, model.scale, model.cap) if with_entropy else None
    last = hidden.detach() if with_hidden else None
    if own is not None and isinstance(mask, Documents):
        part, count = mask.part, len(targets)
        logprobs = part.joined(logprobs, own, count)
        entropy = None if entropy is None else part.joined(entropy, own, count)
        last = None if last is None else part.joined(last, own, count)
    return TokenOutputs(logprobs, entropy, last)


def check_length(tokens: Tensor, mask: Documents | Tensor | None, max_seq_len: int) -> None:
    """Check that no sequence of a micro-batch is longer than the model takes.

    Raises:
        ValueError: one is.
    """
    longest = mask.longest.shape[0] if isinstance(mask, Documents) else tokens.shape[1]
    if longest > max_seq_len:
        raise ValueError(f"a sequence of {longest} tokens is longer than the model's max_seq_len {max_seq_len}")
