"""Which groups of rollouts teach something, by how often their task is solved, and how large groups would have to be.

Of n rollouts of a task that is solved with probability p, some are solved and some are not with probability
``1 - p^n - (1 - p)^n`` (the coverage of CANOPY, arXiv 2609.01245).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from loop_plumbing.grouping import grouped

Groups: TypeAlias = Mapping[str, Mapping[str, int]]
"""``"3/8"``, for tasks of which 3 of 8 rollouts were solved -> ``groups``, and of these ``with_signal``."""


def groups_by_solved(episodes: Iterable[tuple[str, bool, float]]) -> Groups:
    """Count groups by the share solved, from each episode's (task, success, return). Unequal returns are signal."""
    tally: dict[str, dict[str, int]] = {}
    for group in grouped((task, (solved, paid)) for task, solved, paid in episodes).values():
        counts = tally.setdefault(f"{sum(solved for solved, _ in group)}/{len(group)}", {"groups": 0, "with_signal": 0})
        counts["groups"] += 1
        counts["with_signal"] += len({paid for _, paid in group}) > 1
    return dict(sorted(tally.items()))


def solved_rate(key: str) -> float:
    """Return the share of solved rollouts for which a key of :data:`Groups` stands."""
    solved, _, rollouts = key.partition("/")
    return int(solved) / int(rollouts)


def coverage(groups: Groups, size: int) -> float:
    """Return the share of the groups that would have signal by success if they had ``size`` rollouts."""
    rates = [(solved_rate(key), each["groups"]) for key, each in groups.items()]
    covered = sum(count * (1.0 - rate**size - (1.0 - rate) ** size) for rate, count in rates)
    return covered / sum(count for _, count in rates)


def signal_figures(groups: Groups) -> dict[str, Any]:
    """Return the metrics of an iteration's groups. One metric is the smallest group size that would give signal in four
    of five groups of the tasks solved sometimes."""
    sometimes = {key: each for key, each in groups.items() if 0.0 < solved_rate(key) < 1.0}
    if not sometimes:
        return {"groups_by_solved": groups}
    sizes = range(2, 1 << 40)  # beyond it, the rarest task of a file of others has signal
    return {
        "groups_by_solved": groups,
        "enough_rollouts": sizes[bisect.bisect_left(sizes, 0.8, key=lambda size: coverage(sometimes, size))],
    }
