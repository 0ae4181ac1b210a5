"""The two scores of an evaluation, in percent: the share of tasks solved, and of groups all of whose tasks are solved.

Reports keep them as ``tgc`` and ``sgc``, task and scenario goal completion (Trivedi et al. 2024, section 4), and print
the names that the environment gives them. Both are over the tasks they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_environments.description import UNSAID, Description


@dataclass(frozen=True)
class GoalCompletion:
    """``tgc`` and ``sgc`` in percent, over ``tasks`` tasks of ``scenarios`` groups."""

    tgc: float
    sgc: float
    tasks: int
    scenarios: int


def score_names(environment: Description) -> dict[str, str]:
    """Key in a report -> name in print, of the scores that say something: where every task is its own group, one."""
    names = {"tgc": environment.score}
    return names | {"sgc": environment.group_score} if environment.grouped else names


def group_success(successes: Mapping[str, bool], environment: Description = UNSAID) -> dict[str, bool]:
    """Group of tasks -> whether all of its tasks among ``successes`` (task id -> solved) are solved."""
    solved: dict[str, bool] = {}
    for task_id, success in successes.items():
        group = environment.group_of(task_id)
        solved[group] = solved.get(group, True) and bool(success)
    return solved


def goal_completion(successes: Mapping[str, bool], environment: Description = UNSAID) -> GoalCompletion:
    """Both scores of one run.

    Args:
        successes: task id -> whether every requirement of the task passed; a task that was not finished is False.
        environment: says which group a task belongs to.

    Raises:
        ValueError: no tasks, for which neither score is defined.
    """
    if not successes:
        raise ValueError(f"{environment.score} and {environment.group_score} need at least one task")
    groups = group_success(successes, environment)
    return GoalCompletion(
        tgc=100.0 * sum(map(bool, successes.values())) / len(successes),
        sgc=100.0 * sum(groups.values()) / len(groups),
        tasks=len(successes),
        scenarios=len(groups),
    )
