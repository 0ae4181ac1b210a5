"""Success and reward per environment of a mixture, and per group of tasks that a config names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_formats.schema import require
from loop_plumbing.grouping import grouped
from loop_recipes.evaluation.scores import NamedResults, TaskResult, reward_rates, task_success
from loop_recipes.evaluation.statistics import ClusterOf, Difference, Interval, paired_difference, rate_interval
from loop_recipes.evaluation.tables import Table

ALL = "all tasks"


@dataclass(frozen=True)
class GroupScore:
    """The score of one group of tasks: ``success`` in percent, ``reward`` in [0, 1], both first averaged over each
    task's runs, then over tasks."""

    group: str
    tasks: int
    success: Interval
    reward: Interval


@dataclass(frozen=True)
class GroupDifference:
    """Second minus first on the tasks of one group: ``success`` in percentage points, ``reward`` as it is."""

    group: str
    tasks: int
    success: Difference
    reward: Difference


def task_groups(
    tasks: Sequence[str], patterns: Mapping[str, str], environment: Description = DEFAULT_DESCRIPTION
) -> dict[str, list[str]]:
    """Return group -> tasks; the groups are :data:`ALL`, each environment of a mixture, and each pattern of task ids.
    Return {} if :data:`ALL` is the only group.

    Raises:
        ConfigError: a pattern that no task matches, or a group with the name of an environment.
    """
    groups = grouped((name, task) for task in tasks if (name := environment.environment_of(task)))
    for name, pattern in patterns.items():
        require(name not in groups and name != ALL, f"groups.{name}: there is a group of this name without it")
        groups[name] = [task for task in tasks if fnmatchcase(task, pattern)]
        require(groups[name], f"groups.{name}: no task matches {pattern!r}; ids are such as {tasks[0]}")
    return {ALL: list(tasks), **groups} if groups else {}


def score_groups(
    results: Sequence[TaskResult],
    groups: Mapping[str, Sequence[str]],
    environment: Description = DEFAULT_DESCRIPTION,
    **bootstrap: Any,
) -> list[GroupScore]:
    """Score each group that has a rollout.

    ``bootstrap`` as for :func:`~loop_recipes.evaluation.statistics.rate_interval`.
    """
    success, reward = task_success(results), reward_rates(results)
    return [
        GroupScore(
            group,
            len(tasks),
            rate_interval(_of(tasks, success), environment.group_of, **bootstrap).scaled(100.0),
            rate_interval(_of(tasks, reward), environment.group_of, **bootstrap),
        )
        for group, tasks in _with_rollouts(groups, success)
    ]


def difference(
    rates: Callable[[Sequence[TaskResult]], Mapping[str, float]],
    sides: Sequence[NamedResults],
    names: Sequence[str],
    cluster_of: ClusterOf,
    **bootstrap: Any,
) -> Difference:
    """Compare two sides' ``rates`` (of tasks, or of groups of tasks), second minus first, paired over ``names``."""
    first, second = pooled = [rates(side.results) for side in sides]
    deviations = []
    for side, of_all in zip(sides, pooled, strict=True):
        of_each = [rates(results) for results in side.seeds or [side.results]]
        having = [(one, [name for name in names if name in one]) for one in of_each]
        deviations.append([fmean(one[name] - of_all[name] for name in known) for one, known in having if known])
    changes = {name: second[name] - first[name] for name in names}
    return paired_difference(changes, cluster_of, seeds=deviations, **bootstrap)


def compare_groups(
    first: NamedResults,
    second: NamedResults,
    groups: Mapping[str, Sequence[str]],
    environment: Description = DEFAULT_DESCRIPTION,
    **bootstrap: Any,
) -> list[GroupDifference]:
    """Return the difference on each group, paired by task, over the tasks with a rollout on both sides."""
    sides = (first, second)
    before, after = (reward_rates(side.results) for side in sides)
    return [
        GroupDifference(
            group,
            len(tasks),
            difference(task_success, sides, tasks, environment.group_of, **bootstrap).scaled(100.0),
            difference(reward_rates, sides, tasks, environment.group_of, **bootstrap),
        )
        for group, tasks in _with_rollouts(groups, {task: before[task] for task in before if task in after})
    ]


def difference_table(differences: Sequence[GroupDifference]) -> Table:
    """Return a table of the differences, a row for each group."""
    rows = [
        [
            item.group,
            str(item.tasks),
            *difference_cells(item.success, "+.1f"),
            *difference_cells(item.reward, "+.3f"),
        ]
        for item in differences
    ]
    return Table(["group", "tasks", "success difference", "p", "reward difference", "p"], rows)


def difference_cells(difference: Difference, form: str) -> list[str]:
    """Return the two cells of a difference: the value with its interval, in the format ``form``, and its p-value."""
    return [difference.interval.text(form), f"{difference.p_value:.3g}"]


def _with_rollouts(groups: Mapping[str, Sequence[str]], values: Mapping[str, float]) -> Iterator[tuple[str, list[str]]]:
    """Yield each group with its tasks that have a value; skip groups without such tasks."""
    for group, tasks in groups.items():
        if known := [task for task in tasks if task in values]:
            yield group, known


def _of(tasks: Sequence[str], values: Mapping[str, float]) -> dict[str, float]:
    return {task: values[task] for task in tasks}
