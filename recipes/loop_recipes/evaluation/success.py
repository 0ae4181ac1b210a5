"""The two scores of an evaluation, in percent: the share of tasks solved, and of groups all of whose tasks are solved.

Reports store them as ``success`` and ``group_success``, and print the names that the environment gives them. Both are
over the tasks of their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_environments.description import DEFAULT_DESCRIPTION, Description


@dataclass(frozen=True)
class RunSuccess:
    """``success`` and ``group_success`` in percent, over ``tasks`` tasks of ``group_count`` groups."""

    success: float
    group_success: float
    tasks: int
    group_count: int


def score_names(environment: Description) -> dict[str, str]:
    """Return key in a report -> printed name of each score; where every task is its own group, only the first."""
    names = {"success": environment.score}
    return names | {"group_success": environment.group_score} if environment.grouped else names


def group_success(successes: Mapping[str, bool], environment: Description = DEFAULT_DESCRIPTION) -> dict[str, bool]:
    """Return group of tasks -> whether all of its tasks among ``successes`` (task id -> solved) are solved."""
    solved: dict[str, bool] = {}
    for task_id, success in successes.items():
        group = environment.group_of(task_id)
        solved[group] = solved.get(group, True) and bool(success)
    return solved


def run_success(successes: Mapping[str, bool], environment: Description = DEFAULT_DESCRIPTION) -> RunSuccess:
    """Compute both scores of one run.

    Args:
        successes: task id -> whether every requirement of the task passed; a task that was not finished is False.
        environment: says which group a task belongs to.

    Raises:
        ValueError: no tasks, for which neither score is defined.
    """
    if not successes:
        raise ValueError(f"{environment.score} and {environment.group_score} need at least one task")
    groups = group_success(successes, environment)
    return RunSuccess(
        success=100.0 * sum(map(bool, successes.values())) / len(successes),
        group_success=100.0 * sum(groups.values()) / len(groups),
        tasks=len(successes),
        group_count=len(groups),
    )
