"""Deals the rollouts of an iteration to optimizer steps: what stays together, and how large a minibatch is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from loop_recipes.engine.samples import CreditedSample, episodes


def minibatches(
    samples: Sequence[CreditedSample], rollouts: int | None, seed: int, full: bool = False
) -> list[list[CreditedSample]]:
    """Shuffle, then cut into minibatches of about ``rollouts`` (None: one of all), whose sizes differ by one at most.

    Their number follows the rollouts that carry signal. Equal sizes matter with the mean over a minibatch: a remainder
    of one rollout would weigh as much as a whole minibatch. ``full`` cuts minibatches of exactly ``rollouts`` and a
    smaller last one of the rest. The two rollouts of a preference pair stay together; sizes are then even. An episode
    of several rollouts counts as one, and is never cut.
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
    """The preference pairs and single episodes among the samples, in the order of their first."""
    units: dict[str, list[CreditedSample]] = {}
    for sample in samples:
        units.setdefault(sample.pair or sample.episode, []).append(sample)
    return list(units.values())
