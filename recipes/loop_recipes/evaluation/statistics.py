"""Intervals and tests for evaluation scores, with the group of tasks as the unit that was drawn at random.

Tasks of one group share their difficulty and much of their solution, so they are not independent: everything here
resamples or flips whole clusters (groups), never single tasks.

Intervals are percentile bootstraps with pseudo-clusters, the bootstrap form of the "add two successes and two
failures" rule (Agresti & Coull 1998 for a proportion; Agresti & Min 2005 for a paired difference). In simulations a
plain percentile bootstrap of a dozen groups covers 0.87 to 0.92 instead of 0.95, and it is a single point where
every task failed; with the pseudo-clusters the coverage stays at or above the stated level (simulated in
tests/loop_recipes/evaluation/test_statistics.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ClusterOf = Callable[[str], Hashable]
Deviations = Sequence[Sequence[float]]
"""Distances of the mean of each seed from the mean of all seeds, for each side of a difference."""

_RATE_PSEUDO = ((0.0, 1.0), (1.0, 1.0))  # (value, weight): one cluster of failures, one of successes
_DIFFERENCE_PSEUDO = ((-1.0, 0.5), (0.0, 1.0), (1.0, 0.5))
_EXACT_CLUSTERS = 12  # 2**12 sign patterns are enumerated, more clusters are sampled


@dataclass(frozen=True)
class Interval:
    """An estimate, and the bootstrap interval of ``level`` around it, from ``clusters`` clusters."""

    estimate: float
    low: float
    high: float
    level: float
    clusters: int

    def scaled(self, factor: float) -> Interval:
        """Return the same interval in other units, 100 for percent."""
        return Interval(self.estimate * factor, self.low * factor, self.high * factor, self.level, self.clusters)

    def text(self, form: str) -> str:
        """Return the estimate and its bounds, each in the format ``form``, as a table's cell."""
        return f"{self.estimate:{form}} [{self.low:{form}}, {self.high:{form}}]"


def rate_interval(values: Mapping[str, float], cluster_of: ClusterOf, **bootstrap: Any) -> Interval:
    """Return the interval of the mean of ``values``.

    Args:
        values: task (or group) id -> value in [0, 1]: its success, or its success rate over several runs.
        cluster_of: id -> the cluster it belongs to.
        bootstrap: ``level`` of the interval (0.95), ``resamples`` (10,000), ``seed`` (0).

    Raises:
        ValueError: no values, or one outside [0, 1].
    """
    _check(values, 0.0)
    return _interval(values, cluster_of, _RATE_PSEUDO, **bootstrap)


def difference_interval(differences: Mapping[str, float], cluster_of: ClusterOf, **bootstrap: Any) -> Interval:
    """Return the interval of the mean of paired differences in [-1, 1]; arguments as for :func:`rate_interval`. The
    variance between ``seeds`` widens the interval."""
    _check(differences, -1.0)
    return _interval(differences, cluster_of, _DIFFERENCE_PSEUDO, **bootstrap)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its bootstrap interval, and the p-value of "no difference"."""

    interval: Interval
    p_value: float

    def scaled(self, factor: float) -> Difference:
        """Return the same difference in other units, 100 for percentage points."""
        return Difference(self.interval.scaled(factor), self.p_value)


def paired_difference(
    differences: Mapping[str, float],
    cluster_of: ClusterOf,
    *,
    seed: int = 0,
    seeds: Deviations = (),
    **bootstrap: Any,
) -> Difference:
    """Return interval and p-value of the mean of paired differences in [-1, 1]; arguments: :func:`difference_interval`.

    With several seeds the p-value is the larger one of two: over the tasks, and by Student's t over the seeds.
    """
    interval = difference_interval(differences, cluster_of, seed=seed, seeds=seeds, **bootstrap)
    p_value = permutation_p_value(differences, cluster_of, seed=seed)
    if (noise := _seed_noise(seeds, 20_000, seed)) is not None:
        p_value = max(p_value, float(np.mean(np.abs(noise) >= abs(interval.estimate) - 1e-9)))
    return Difference(interval, p_value)


def permutation_p_value(
    differences: Mapping[str, float], cluster_of: ClusterOf, *, permutations: int = 20_000, seed: int = 0
) -> float:
    """Return the two-sided p-value of the paired sign-flip test that neither side is better.

    Under the null hypothesis the two sides of a cluster can be exchanged, so the sign of its summed difference is
    arbitrary. Up to 12 clusters all sign patterns are enumerated; beyond, they are drawn at random, and the observed
    pattern counts as one of them, so the value is never zero.
    """
    _check(differences, -1.0)
    sums, _ = _cluster_sums(differences, cluster_of)
    observed = abs(sums.sum()) - 1e-9
    if len(sums) <= _EXACT_CLUSTERS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(sums))))
        return float(np.mean(np.abs(signs @ sums) >= observed))
    signs = np.random.default_rng(seed).integers(0, 2, size=(permutations, len(sums))) * 2.0 - 1.0
    return float((1 + np.sum(np.abs(signs @ sums) >= observed)) / (1 + permutations))


def _check(values: Mapping[str, float], lowest: float) -> None:
    if not values:
        raise ValueError("an interval needs at least one value")
    for name, value in values.items():
        if not lowest <= value <= 1.0:
            raise ValueError(f"{name}: {value} is outside [{lowest:g}, 1]")


def _cluster_sums(values: Mapping[str, float], cluster_of: ClusterOf) -> tuple[np.ndarray, np.ndarray]:
    """Return (sum of values, number of values) of each cluster, both [c], in order of first appearance."""
    sums: dict[Hashable, float] = {}
    sizes: dict[Hashable, int] = {}
    for name, value in values.items():
        cluster = cluster_of(name)
        sums[cluster] = sums.get(cluster, 0.0) + float(value)
        sizes[cluster] = sizes.get(cluster, 0) + 1
    return np.array(list(sums.values())), np.array(list(sizes.values()), dtype=float)


def _seed_noise(seeds: Deviations, draws: int, seed: int) -> np.ndarray | None:
    """Draw how far other seeds could have moved a difference, [draws], by Student's t with the pooled variance of both
    sides' seeds: a side with one seed is assumed to vary as the other. None if each side has one seed."""
    degrees = sum(len(side) - 1 for side in seeds)
    if not degrees:
        return None
    variance = sum(float(np.var(side)) * len(side) for side in seeds) / degrees
    error = (variance * sum(1.0 / len(side) for side in seeds)) ** 0.5
    return error * np.random.default_rng([seed, 1]).standard_t(degrees, draws)


def _interval(
    values: Mapping[str, float],
    cluster_of: ClusterOf,
    pseudo: tuple[tuple[float, float], ...],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    seeds: Deviations = (),
) -> Interval:
    sums, sizes = _cluster_sums(values, cluster_of)
    estimate = float(sums.sum() / sizes.sum())
    typical = sizes.mean()
    all_sums = np.concatenate([sums, [value * typical for value, _ in pseudo]])
    all_sizes = np.concatenate([sizes, np.full(len(pseudo), typical)])
    weights = np.concatenate([np.ones(len(sums)), [weight for _, weight in pseudo]])
    draws = round(weights.sum())
    counts = np.random.default_rng(seed).multinomial(draws, weights / weights.sum(), size=resamples)
    means = (counts @ all_sums) / (counts @ all_sizes)
    if (noise := _seed_noise(seeds, resamples, seed)) is not None:
        means = np.clip(means + noise, -1.0, 1.0)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    # The pseudo-clusters pull towards the middle; near the ends the estimate itself must stay inside.
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate), level, len(sums))
