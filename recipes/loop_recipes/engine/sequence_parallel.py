"""Rows that several ranks share, each a part of the tokens (DeepSpeed-Ulysses, arXiv 2309.14509).

Except for attention, a decoder treats tokens one by one, so each rank takes its own part of a packed row through it.
For attention the ranks exchange tokens for heads: then each has all tokens of the row, for its share of the heads; and
back. The outputs for the sampled tokens are joined, so that each rank computes the whole row's loss, of any kind. Ranks
that share rows have neighbouring numbers, like the ranks of one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from loop_recipes.engine.process_group import STEP_TIMEOUT_S


@dataclass(frozen=True)
class RowPart:
    """The part of each row that a rank takes: ``number``, from 0, of ``of`` equal parts for the ranks in ``group``."""

    number: int = 0
    of: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_this_rank(cls, of: int) -> RowPart:
        """Return this rank's part if ``of`` ranks, a divisor of all, share each row. Every rank must call this."""
        if of == 1:
            return WHOLE
        group, _ = dist.new_subgroups(of, timeout=timedelta(seconds=STEP_TIMEOUT_S))
        return cls(dist.get_rank(group), of, group)

    @property
    def is_leader(self) -> bool:
        """True on one of the ranks that share rows. All compute the same losses; only the leader's count."""
        return self.number == 0

    def here(self, tokens: int) -> slice:
        """Return the slice of a row's tokens that is this rank's; ``of`` divides their number."""
        size = tokens // self.of
        return slice(self.number * size, (self.number + 1) * size)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Turn tensors [s / of, h, d] of own tokens, all heads, into tensors [s, h / of, d] of all tokens, own heads.

        The tensors are exchanged together. If there are fewer heads than ranks, a head goes to several ranks.
        """
        every = [each.repeat_interleave(max(1, self.of // each.shape[1]), dim=1) for each in tensors]
        sent = torch.cat([each.unflatten(1, (self.of, -1)).transpose(0, 1) for each in every], dim=2)
        received = _Exchanged.apply(sent, self.group).flatten(0, 1)
        return received.split([each.shape[1] // self.of for each in every], dim=1)

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`to_heads` for one tensor."""
        received = _Exchanged.apply(tensor.unflatten(0, (self.of, -1)), self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def joined(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """Return a tensor [count, ...] with every rank's ``values`` [m, ...] at the rank's indices ``own`` [m]."""
        return _Joined.apply(values, own, count, self)


WHOLE = RowPart()


class _Exchanged(torch.autograd.Function):
    """Sends row i to rank i; row i of the result comes from rank i. The gradient goes back the same way."""

    @staticmethod
    def forward(ctx, sent, group):
        ctx.group = group
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx, upstream):
        return _Exchanged.apply(upstream, ctx.group), None


class _Joined(torch.autograd.Function):
    """Forward: the sum over ranks of values that are 0 on all ranks but one. Backward: all ranks have the same loss, so
    the sum of their gradients is a multiple of each gradient."""

    @staticmethod
    def forward(ctx, values, own, count, part):
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, own, values)
        dist.all_reduce(whole, group=part.group)
        ctx.save_for_backward(own)
        ctx.of = part.of
        return whole

    @staticmethod
    def backward(ctx, upstream):
        (own,) = ctx.saved_tensors
        return upstream[own] * ctx.of, None, None, None
