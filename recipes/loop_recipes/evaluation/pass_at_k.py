"""pass@k and pass^k: whether any, and whether all, of k attempts at a task solve it.

If c of n attempts solved a task, the shares of the sets of k attempts with at least one success, and with successes
only, are unbiased estimates of the probabilities: pass@k = 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv
2107.03374, equation 1), pass^k = C(c, k) / C(n, k) (Yao et al. 2024, arXiv 2406.12045, section 3). A score is the mean
over all tasks; a task with fewer than k attempts counts with all its attempts. Its interval resamples groups of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loop_plumbing.grouping import grouped
from loop_recipes.evaluation.statistics import ClusterOf, Interval, rate_interval

MOST_IN_A_ROW = 8
"""Number of runs up to which the report lists each k; with more, the powers of two and the number of runs."""


@dataclass(frozen=True)
class PassAtK:
    """Both scores in percent, over ``tasks`` tasks; ``whole`` of them have at least ``k`` attempts."""

    k: int
    tasks: int
    whole: int
    any: Interval
    all: Interval


def any_of(k: int, solved: int, attempts: int) -> float:
    """Return pass@k of a task."""
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def all_of(k: int, solved: int, attempts: int) -> float:
    """Return pass^k of a task."""
    return math.comb(solved, k) / math.comb(attempts, k)


def passes(runs: Sequence[Mapping[str, bool]], cluster_of: ClusterOf, **bootstrap: Any) -> list[PassAtK]:
    """Compute pass@k and pass^k for each reported k; [] if there is only one run.

    Args:
        runs: for each run, task id -> solved; lost rollouts are left out.
        cluster_of: task id -> its group.
        bootstrap: as for :func:`~loop_recipes.evaluation.statistics.rate_interval`.
    """
    counts = grouped(item for run in runs for item in run.items())
    most = max(map(len, counts.values()), default=0)
    scores = []
    for k in chosen_k(most) if most > 1 else ():
        whole = sum(len(each) >= k for each in counts.values())
        first, every = (
            rate_interval(
                {task: of(min(k, len(each)), sum(each), len(each)) for task, each in counts.items()},
                cluster_of,
                **bootstrap,
            ).scaled(100.0)
            for of in (any_of, all_of)
        )
        scores.append(PassAtK(k, len(counts), whole, first, every))
    return scores


def chosen_k(most: int) -> list[int]:
    if most <= MOST_IN_A_ROW:
        return list(range(1, most + 1))
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
