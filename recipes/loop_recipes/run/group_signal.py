"""Which groups of rollouts teach something, by how often their task is solved, and how large groups would have to be.

Of n rollouts of a task that is solved with probability p, some are solved and some are not with probability
``1 - p^n - (1 - p)^n`` (the coverage of CANOPY, arXiv 2609.01245).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Groups: TypeAlias = Mapping[str, Mapping[str, int]]
"""``"3/8"``, for tasks of which 3 of 8 rollouts were solved -> ``groups``, and of these ``with_signal``."""
ENOUGH = 0.8
"""Of the groups: four of five."""


def groups_by_solved(episodes: Iterable[tuple[str, bool, float]]) -> Groups:
    """Count groups by the share that was solved; one whose returns differ has signal.

    Args:
        episodes: of each its task, whether it was solved, and its return.
    """
    tasks: dict[str, list[tuple[bool, float]]] = {}
    for task, solved, paid in episodes:
        tasks.setdefault(task, []).append((solved, paid))
    found: dict[str, dict[str, int]] = {}
    for group in tasks.values():
        counts = found.setdefault(f"{sum(solved for solved, _ in group)}/{len(group)}", {"groups": 0, "with_signal": 0})
        counts["groups"] += 1
        counts["with_signal"] += len({paid for _, paid in group}) > 1
    return dict(sorted(found.items()))


def solved_rate(key: str) -> float:
    """The share of a key of :data:`Groups`."""
    solved, _, rollouts = key.partition("/")
    return int(solved) / int(rollouts)


def coverage(groups: Groups, size: int) -> float:
    """The share of the groups that would have signal by success if they were of so many rollouts."""
    total = sum(each["groups"] for each in groups.values())
    rates = ((solved_rate(key), each["groups"]) for key, each in groups.items())
    return sum(count * (1.0 - rate**size - (1.0 - rate) ** size) for rate, count in rates) / total


def enough_rollouts(groups: Groups) -> int | None:
    """The smallest size that would give four of five groups signal, of tasks solved sometimes; None without any."""
    sometimes = {key: each for key, each in groups.items() if 0.0 < solved_rate(key) < 1.0}
    size = 2
    while sometimes and coverage(sometimes, size) < ENOUGH:
        size += 1
    return size if sometimes else None


def signal_figures(groups: Groups) -> dict[str, Any]:
    """The metrics of an iteration's groups."""
    enough = enough_rollouts(groups)
    return {"groups_by_solved": groups} | ({} if enough is None else {"enough_rollouts": enough})
