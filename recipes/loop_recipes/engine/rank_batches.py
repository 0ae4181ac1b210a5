"""A rank's share of the rollouts that all ranks hold, as micro-batches; and the way back, from each rank to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torchtune.utils import get_world_size_and_rank

from loop_recipes.bar import Bar
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.batching import BatchLayout, MicroBatch, StepBatch, computed, micro_batches, step_batches
from loop_recipes.engine.process_group import sum_over_ranks
from loop_recipes.engine.samples import AnySample, CreditedSample, Sample
from loop_recipes.engine.sequence_parallel import WHOLE, RowPart


class RankBatches:
    """Makes this rank's micro-batches; each rank gets as many as every other rank.

    Args:
        config: sets how many tokens a micro-batch has, and whether its rollouts are packed.
        device: where the micro-batches go.
        part: this rank's part of each packed row.

    Attributes:
        groups: the number of groups of ranks; the ranks of a group share packed rows.
        is_leader: true on the one rank of a group whose results count.
        is_main: true on rank 0.
    """

    def __init__(self, config: UpdateConfig, device: torch.device, part: RowPart = WHOLE) -> None:
        self.device = device
        ranks, rank = get_world_size_and_rank()
        # Ranks that share rows are one where rollouts are dealt and losses added up.
        self.groups, self.is_leader, self.is_main = ranks // part.of, part.is_leader, rank == 0
        group = rank // part.of
        self._layout = BatchLayout(config.micro_batch_tokens, config.packed, self.groups, group, part)

    def without_loss(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the samples of all ranks."""
        batches = micro_batches(_longest_first(samples), self._layout)
        with self.bar(len(batches), "recomputing") as bar:
            for batch in batches:
                yield batch.to(self.device)
                bar.update()

    def of_step(self, samples: Sequence[CreditedSample]) -> Iterator[StepBatch]:
        """Yield this rank's micro-batches of a minibatch of all ranks, with the tensors that a loss needs."""
        for batch in step_batches(_longest_first(samples), self._layout):
            yield batch.to(self.device)

    def bar(self, total: int, doing: str) -> Bar:
        """Return a progress bar for rank 0's terminal."""
        return Bar(total=total, doing=doing, disable=None if self.is_main else True)

    def rehearsed(self, samples: Sequence[CreditedSample]) -> Iterator[StepBatch]:
        """Yield micro-batches of all the samples, the same on every rank."""
        for batch in step_batches(samples, replace(self._layout, world_size=1, rank=0)):
            yield batch.to(self.device)

    def computed(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Count the tokens that go through the model: see :func:`~loop_recipes.engine.batching.computed`."""
        return computed(samples, self._layout)


def _longest_first(samples: Sequence[AnySample]) -> list[AnySample]:
    return sorted(samples, key=lambda sample: (-sample.tokens, sample.rollout_id))


def of_all_ranks(parts: Mapping[str, Tensor], samples: Sequence[Sample], like: Tensor) -> dict[str, Tensor]:
    """Return the ``parts`` [n, ...] of all ranks, by rollout id.

    Args:
        like: a tensor with the parts' dtype and trailing sizes, for a rank without parts.
    """
    counts = {sample.rollout_id: len(sample.sampler_logprobs) for sample in samples}
    # Another rank's are zeros here, so that the sum is exact.
    whole = [parts[name] if name in parts else like.new_zeros(n, *like.shape[1:]) for name, n in counts.items()]
    return dict(zip(counts, sum_over_ranks(torch.cat(whole)).split(list(counts.values())), strict=True))
