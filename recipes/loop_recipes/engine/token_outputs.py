"""The outputs of every decoder here: the log-probs of given tokens in place of all logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.logprobs import Head

CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""The text that activation checkpointing puts into the names of a layer's parameters."""


class TokenOutputs(NamedTuple):
    """The outputs of a decoder for each of n sampled tokens.

    ``logprobs`` [n] are fp32, with gradient. ``entropy`` [n] and ``hidden`` [n, d], the normed last hidden states for
    a value function, are computed only if asked for, without gradient.
    """

    logprobs: Tensor
    entropy: Tensor | None
    hidden: Tensor | None


class LogProbModule:
    """The forward pass of a decoder that answers with the log-probs of given tokens in place of all logits.

    Attributes:
        head: one of the heads of :mod:`~loop_recipes.engine.logprobs`.
        scale, cap: logits are multiplied by ``scale`` and, unless it is None, kept below ``cap``.
    """

    head: Head
    scale: float = 1.0
    cap: float | None = None
    max_seq_len: int

    def last_hidden(self, tokens: Tensor, rows: Tensor, input_pos: Tensor | None, mask: Documents | None) -> Tensor:
        """Return the normed last hidden states [m, d] at ``rows``; the arguments are those of :meth:`forward`."""
        raise NotImplementedError

    def output_weight(self) -> Tensor:
        """Return the output matrix [v, d], read inside the root's own forward, where FSDP2 has gathered it."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        *,
        rows: Tensor,
        targets: Tensor,
        own: Tensor | None = None,
        input_pos: Tensor | None = None,
        mask: Documents | None = None,
        with_entropy: bool = False,
        with_hidden: bool = False,
    ) -> TokenOutputs:
        """Return log-probs of the targets, and the other outputs that the arguments ask for.

        Args:
            tokens: [r, s].
            rows: [n], index into the flattened [r * s] of the position that predicts each target.
            targets: [n].
            own: [m], if ranks share a packed row, the indices of the targets that the rows [m] here predict; None: all.
            input_pos: [r, s], positions below ``max_seq_len``; None means each row counts from 0.
            mask: None for causal attention, or the documents of a packed row.
            with_entropy, with_hidden: compute these too; they are None otherwise.

        Raises:
            ValueError: a rollout is longer than ``max_seq_len``.
        """
        longest = tokens.shape[1] if mask is None else mask.longest.shape[0]
        if longest > self.max_seq_len:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than the model's max_seq_len {self.max_seq_len}"
            )
        hidden, weight = self.last_hidden(tokens, rows, input_pos, mask), self.output_weight()
        logprobs = self.head(hidden, weight, targets if own is None else targets[own], self.scale, self.cap)
        entropy = self.head.entropy(hidden, weight, self.scale, self.cap) if with_entropy else None
        last = hidden.detach() if with_hidden else None
        if own is None or mask is None:
            return TokenOutputs(logprobs, entropy, last)
        part, count = mask.part, len(targets)
        others = (None if each is None else part.joined(each, own, count) for each in (entropy, last))
        return TokenOutputs(part.joined(logprobs, own, count), *others)
