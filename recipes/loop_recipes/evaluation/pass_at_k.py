"""pass@k and pass^k: whether any, and whether all, of k attempts at a task solve it.

Of n attempts at a task of which c solved it, the shares of the sets of k attempts in which at least one did, and in
which all did, are without bias for the probabilities: pass@k = 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv
2107.03374, equation 1), pass^k = C(c, k) / C(n, k) (Yao et al. 2024, arXiv 2406.12045, section 3). A score is the mean
over all tasks, of which one with fewer than k attempts counts with those that it has; its interval resamples groups of
tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loop_recipes.evaluation.statistics import ClusterOf, Interval, rate_interval

MOST_IN_A_ROW = 8
"""Up to so many runs each k is shown; with more, the powers of two and the number of runs."""


@dataclass(frozen=True)
class PassAtK:
    """Both in percent, over ``tasks`` tasks, of which ``whole`` have at least ``k`` attempts."""

    k: int
    tasks: int
    whole: int
    any: Interval
    all: Interval


def any_of(k: int, solved: int, attempts: int) -> float:
    """pass@k of a task."""
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def all_of(k: int, solved: int, attempts: int) -> float:
    """pass^k of a task."""
    return math.comb(solved, k) / math.comb(attempts, k)


def passes(runs: Sequence[Mapping[str, bool]], cluster_of: ClusterOf, **bootstrap: Any) -> list[PassAtK]:
    """Both for each k that these runs tell; [] where there is one run.

    Args:
        runs: for each run, task id -> solved; what was lost is left out.
        cluster_of: task id -> its group.
        bootstrap: of :func:`~loop_recipes.evaluation.statistics.rate_interval`.
    """
    counts: dict[str, list[bool]] = {}
    for run in runs:
        for task, solved in run.items():
            counts.setdefault(task, []).append(solved)
    most = max(map(len, counts.values()), default=0)
    found = []
    for k in _shown(most) if most > 1 else ():
        whole = sum(len(each) >= k for each in counts.values())
        first, every = (
            rate_interval(
                {task: of(min(k, len(each)), sum(each), len(each)) for task, each in counts.items()},
                cluster_of,
                **bootstrap,
            ).scaled(100.0)
            for of in (any_of, all_of)
        )
        found.append(PassAtK(k, len(counts), whole, first, every))
    return found


def _shown(most: int) -> list[int]:
    if most <= MOST_IN_A_ROW:
        return list(range(1, most + 1))
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
