"""Deals the rollouts of an iteration to optimizer steps: the units that stay together, the sizes of minibatches, and
how their losses become one number. Here alone ``update.loss_divisor`` counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from loop_formats.schema import require
from loop_plumbing.grouping import grouped
from loop_recipes.algorithm.losses import PolicyLoss
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.batching import StepBatch
from loop_recipes.engine.samples import CreditedSample, episodes


def minibatches(
    samples: Sequence[CreditedSample], rollouts: int | None, seed: int, full: bool = False
) -> list[list[CreditedSample]]:
    """Shuffle the samples and cut them into minibatches of about ``rollouts``. None makes one minibatch of all.

    The sizes differ by one at most, because the loss is a mean over a minibatch: a remainder of one rollout would weigh
    as much as a whole minibatch. ``full`` cuts minibatches of exactly ``rollouts`` and a smaller last one. How many
    minibatches there are depends on the rollouts that carry signal. The two rollouts of a preference pair stay
    together, so sizes are even then. An episode of several rollouts counts as one and is never cut.
    """
    units, count = minibatch_units(samples), len(episodes(samples))
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed)).tolist()
    if rollouts is not None and full:
        size = max(1, rollouts * len(units) // count)
        bounds = [*range(0, len(units), size), len(units)]
    else:
        parts = 1 if rollouts is None else min(len(units), max(1, round(count / rollouts)))
        bounds = [len(units) * number // parts for number in range(parts + 1)]
    return [[sample for i in order[low:high] for sample in units[i]] for low, high in itertools.pairwise(bounds)]


def minibatch_units(samples: Sequence[CreditedSample]) -> list[list[CreditedSample]]:
    """Return the preference pairs and single episodes of the samples, in the order of the first sample of each."""
    return list(grouped((sample.pair or sample.episode, sample) for sample in samples).values())


@dataclass(frozen=True)
class Averaging:
    """The average over a minibatch: a sum over its micro-batches and ranks, divided once by the number of rollouts (or
    pairs), the number of sampled tokens, or a constant. Unless ``over_tokens``, each rollout is averaged first."""

    divisor: float
    over_tokens: bool

    @classmethod
    def of(cls, minibatch: Sequence[CreditedSample], config: UpdateConfig) -> Self:
        """Return the average over a minibatch of all ranks."""
        if config.loss_divisor == "tokens":
            return cls(sum(int(sample.mask.sum()) for sample in minibatch), True)
        return cls(len(minibatch_units(minibatch)) if config.loss_divisor == "mean" else config.loss_divisor, False)

    def term(self, losses: Tensor, batch: StepBatch, are_sums: bool = False) -> Tensor:
        """Return a micro-batch's term. ``losses`` [b] are each rollout's share of the mean over its episode's sampled
        tokens or, if ``are_sums``, the sums over its own sampled tokens."""
        return (losses * batch.episode_tokens if self.over_tokens and not are_sums else losses).sum() / self.divisor


def check_divisor(config: UpdateConfig, loss: PolicyLoss, name: str) -> None:
    """Raise ConfigError if the average that ``config`` asks for has no meaning for the loss of this name."""
    whole = "a pair of rollouts" if loss.plan.compares_pairs else f"a whole {loss.level}"
    require(
        config.loss_divisor != "tokens" or (loss.level in ("token", "geometric") and not loss.plan.compares_pairs),
        f"update.loss_divisor: tokens is a mean over tokens, and a term of {name} is of {whole}; give mean or a number",
    )
