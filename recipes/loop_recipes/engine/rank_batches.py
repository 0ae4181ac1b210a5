"""A rank's share of the rollouts that all ranks hold, as micro-batches; and the way back, from each rank to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torchtune.utils import get_world_size_and_rank

from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.batching import MicroBatch, StepBatch, computed, micro_batches, step_batches
from loop_recipes.engine.process_group import sum_over_ranks
from loop_recipes.engine.samples import AnySample, CreditedSample, Sample
from loop_recipes.engine.sequence_parallel import WHOLE, Part
from loop_recipes.terminal import Bar

PAD_ID = 0  # never seen by anything: padding is on the right of causal attention and selects no row for the head


class RankBatches:
    """Makes this rank's micro-batches; each rank gets as many as every other rank.

    Args:
        config: says how many tokens a micro-batch has, and whether its rollouts are packed.
        device: where the micro-batches go.
        part: what this rank takes of each packed row.

    Attributes:
        groups: how many groups of ranks there are; the ranks of a group share packed rows.
        leads: whether this rank speaks for its group.
    """

    def __init__(self, config: UpdateConfig, device: torch.device, part: Part = WHOLE) -> None:
        self.device = device
        self._config, self._part = config, part
        ranks, self._rank = get_world_size_and_rank()
        # Ranks that share rows are one where rollouts are dealt and losses added up.
        self.groups, self._group = ranks // part.of, self._rank // part.of
        self.leads = part.leads

    def without_loss(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the samples of all ranks."""
        batches = micro_batches(*self._of_this_rank(samples))
        with self.bar(len(batches), "recomputing") as bar:
            for batch in batches:
                yield batch.to(self.device)
                bar.update()

    def of_step(self, samples: Sequence[CreditedSample]) -> Iterator[StepBatch]:
        """Yield this rank's micro-batches of a minibatch of all ranks, with what a loss asks for."""
        for batch in step_batches(*self._of_this_rank(samples)):
            yield batch.to(self.device)

    def bar(self, total: int, doing: str) -> Bar:
        """Return a progress bar for rank 0's terminal."""
        return Bar(total=total, doing=doing, disable=None if self._rank == 0 else True)

    def rehearsed(self, samples: Sequence[CreditedSample]) -> Iterator[StepBatch]:
        """Yield micro-batches of all the samples, on every rank the same."""
        config = self._config
        for batch in step_batches(samples, config.micro_batch_tokens, PAD_ID, config.packed, part=self._part):
            yield batch.to(self.device)

    def computed(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Count the tokens that go through the model: see :func:`~loop_recipes.engine.batching.computed`."""
        return computed(samples, self._config.micro_batch_tokens, self._config.packed, self._part.of)

    def _of_this_rank(self, samples: Sequence[AnySample]) -> tuple[list[AnySample], int, int, bool, int, int, Part]:
        ordered = sorted(samples, key=lambda sample: (-sample.tokens, sample.rollout_id))
        config = self._config
        return ordered, config.micro_batch_tokens, PAD_ID, config.packed, self.groups, self._group, self._part


def of_all_ranks(parts: Mapping[str, Tensor], samples: Sequence[Sample], like: Tensor) -> dict[str, Tensor]:
    """Return this rank's ``parts`` [n, ...] and the other ranks', by rollout id.

    Args:
        like: has the dtype and the last sizes of the parts, for a rank that has none.
    """
    counts = {sample.rollout_id: len(sample.sampler_logprobs) for sample in samples}
    # Another rank's are zeros here, so that the sum is exact.
    whole = [parts[name] if name in parts else like.new_zeros(n, *like.shape[1:]) for name, n in counts.items()]
    return dict(zip(counts, sum_over_ranks(torch.cat(whole)).split(list(counts.values())), strict=True))
