"""AppWorld's two scores: task goal completion (TGC) and scenario goal completion (SGC), in percent.

TGC is the share of tasks solved, SGC the share of scenarios all of whose tasks are solved (Trivedi et al. 2024,
AppWorld, section 4). Both are over the tasks they are given; the engine's own `appworld evaluate` prints the same
figures rounded to one digit, over a whole split and over the tasks of each difficulty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from appworld_adapter.dataset import scenario_of


@dataclass(frozen=True)
class GoalCompletion:
    """``tgc`` and ``sgc`` in percent, over ``tasks`` tasks of ``scenarios`` scenarios."""

    tgc: float
    sgc: float
    tasks: int
    scenarios: int


def scenario_success(successes: Mapping[str, bool]) -> dict[str, bool]:
    """Scenario id -> whether all of its tasks among ``successes`` (task id -> solved) are solved."""
    solved: dict[str, bool] = {}
    for task_id, success in successes.items():
        scenario = scenario_of(task_id)
        solved[scenario] = solved.get(scenario, True) and bool(success)
    return solved


def goal_completion(successes: Mapping[str, bool]) -> GoalCompletion:
    """TGC and SGC of one run.

    Args:
        successes: task id -> whether every requirement of the task passed; a task that was not finished is False.

    Raises:
        ValueError: no tasks, for which neither figure is defined.
    """
    if not successes:
        raise ValueError("TGC and SGC need at least one task")
    scenarios = scenario_success(successes)
    return GoalCompletion(
        tgc=100.0 * sum(map(bool, successes.values())) / len(successes),
        sgc=100.0 * sum(scenarios.values()) / len(scenarios),
        tasks=len(successes),
        scenarios=len(scenarios),
    )


def goal_completion_by_difficulty(
    successes: Mapping[str, bool], difficulties: Mapping[str, int]
) -> dict[int, GoalCompletion]:
    """:func:`goal_completion` over the tasks of each difficulty, ascending.

    Args:
        difficulties: task id -> difficulty (1 to 3); tasks without one are left out.
    """
    groups: dict[int, dict[str, bool]] = defaultdict(dict)
    for task_id, success in successes.items():
        if task_id in difficulties:
            groups[difficulties[task_id]][task_id] = success
    return {difficulty: goal_completion(groups[difficulty]) for difficulty in sorted(groups)}
