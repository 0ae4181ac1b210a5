"""Two evaluations of the same tasks, compared task by task: differences, their intervals, a permutation test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_plumbing.grouping import grouped
from loop_recipes.evaluation.groups import (
    GroupDifference,
    compare_groups,
    difference,
    difference_cells,
    difference_table,
)
from loop_recipes.evaluation.scores import (
    NamedResults,
    TaskResult,
    group_rates,
    score_bounds,
    score_names,
    success_table,
    task_success,
)
from loop_recipes.evaluation.statistics import Difference
from loop_recipes.evaluation.tables import Document, Table


@dataclass(frozen=True)
class Comparison:
    """The difference of two scores, second minus first, in percentage points.

    All figures are over the ``tasks`` tasks for which both sides have a rollout. ``gained`` and ``lost`` hold (task id,
    success rate of the first, of the second), largest change first. ``lost_rollouts`` counts the lost rollouts of each
    side, and ``success_bounds`` and ``group_success_bounds`` are the smallest and the largest difference that they
    could have made; None where there are none.
    """

    first: str
    second: str
    sampling: str
    tasks: int
    success: Difference
    group_success: Difference
    gained: list[tuple[str, float, float]]
    lost: list[tuple[str, float, float]]
    groups: list[GroupDifference] = field(default_factory=list)
    lost_rollouts: tuple[int, int] = (0, 0)
    success_bounds: tuple[float, float] | None = None
    group_success_bounds: tuple[float, float] | None = None


def pool_seeds(label: str, evaluations: Sequence[Sequence[NamedResults]]) -> list[NamedResults]:
    """Pool the seeds of several evaluations of one setting: of the policies with the same name, or of the only policy
    under each way of sampling. A pooled policy is called ``label``, with its own name if there are several.

    Raises:
        ValueError: an evaluation lacks a policy, or has other tasks or numbers of runs.
    """
    alone = all(len({item.sampling for item in each}) == len(each) for each in evaluations)
    every = [item for each in evaluations for item in each]
    by_policy = grouped((("" if alone else f"/{item.name}", item.sampling), item) for item in every)
    pooled = []
    for (name, sampling), items in by_policy.items():
        if len(items) < len(evaluations):
            raise ValueError(f"{label}: not every evaluation has {items[0].name}, {sampling}; pool those that have it")
        runs = [Counter(result.task_id for result in item.results) for item in items]
        if any(each != runs[0] for each in runs):
            raise ValueError(f"{label}: its evaluations have other tasks or runs; evaluate all with the same")
        most = max(result.run for item in items for result in item.results) + 1
        seeds = [
            [replace(result, run=result.run + most * number) for result in item.results]
            for number, item in enumerate(items)
        ]
        results = [result for seed in seeds for result in seed]
        pooled.append(NamedResults(f"{label}{name} ({len(items)} seeds)", sampling, results, seeds))
    return pooled


def compare(
    first: NamedResults,
    second: NamedResults,
    groups: Mapping[str, Sequence[str]] | None = None,
    environment: Description = DEFAULT_DESCRIPTION,
    **bootstrap: Any,
) -> Comparison:
    """Compare two policies paired by task, and by group of tasks; rates over several runs are averaged per task first.

    Args:
        groups: name -> tasks; each group is also compared by itself.
        environment: knows the group of each task.
        bootstrap: as for :func:`~loop_recipes.evaluation.statistics.rate_interval`.

    Raises:
        ValueError: the policies have different tasks, or no task for which both have a rollout.
    """
    task_ids = [{result.task_id for result in side.results} for side in (first, second)]
    if odd := sorted(task_ids[0] ^ task_ids[1]):
        raise ValueError(
            f"{first.name} and {second.name} are not over the same tasks: {len(odd)} are in only one, such as {odd[0]}"
        )
    before, after = (task_success(side.results) for side in (first, second))
    both = [task for task in before if task in after]
    if not both:
        raise ValueError(f"{first.name} and {second.name} have no task in common that was not lost")

    def groups_of(results: Sequence[TaskResult]) -> dict[str, float]:
        return group_rates(success_table(each for each in results if each.task_id in tasks), environment)

    lost = tuple(sum(result.lost for result in side.results) for side in (first, second))
    bounds = [score_bounds(side.results, environment) for side in (first, second)] if any(lost) else []
    tasks = {task: after[task] - before[task] for task in both}
    named_groups = list(dict.fromkeys(map(environment.group_of, both)))
    changes = sorted(tasks, key=lambda task: (-abs(tasks[task]), task))
    return Comparison(
        first=first.name,
        second=second.name,
        sampling=first.sampling,
        tasks=len(tasks),
        success=difference(task_success, (first, second), both, environment.group_of, **bootstrap).scaled(100.0),
        group_success=difference(groups_of, (first, second), named_groups, str, **bootstrap).scaled(100.0),
        gained=[(task, before[task], after[task]) for task in changes if tasks[task] > 0],
        lost=[(task, before[task], after[task]) for task in changes if tasks[task] < 0],
        groups=compare_groups(first, second, groups or {}, environment, **bootstrap),
        lost_rollouts=(lost[0], lost[1]),
        success_bounds=_difference_bounds(*(each.success for each in bounds)) if bounds else None,
        group_success_bounds=_difference_bounds(*(each.group_success for each in bounds)) if bounds else None,
    )


def _difference_bounds(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return second[0] - first[1], second[1] - first[0]


def lost_lines(comparisons: Sequence[Comparison], environment: Description = DEFAULT_DESCRIPTION) -> list[str]:
    """Return a line for each difference with lost rollouts: the bounds that the lost rollouts leave."""
    names = score_names(environment)

    def ranges(item: Comparison) -> str:
        bounds = {name: getattr(item, f"{key}_bounds") for key, name in names.items()}
        text = ", ".join(f"the {name} difference in [{low:+.1f}, {high:+.1f}]" for name, (low, high) in bounds.items())
        return text.replace(" difference in ", " difference would lie in ", 1)

    return [
        f"- {_title(item)}: {item.lost_rollouts[1]} and {item.lost_rollouts[0]} "
        f"rollouts lost, compared on {item.tasks} tasks; had they all failed or succeeded, {ranges(item)}"
        for item in comparisons
        if item.success_bounds is not None
    ]


def compare_with_first(
    scores: Sequence[NamedResults],
    groups: Mapping[str, Sequence[str]] | None = None,
    environment: Description = DEFAULT_DESCRIPTION,
    **bootstrap: Any,
) -> list[Comparison]:
    """For every way of sampling, compare the first policy with each other policy."""
    return [
        compare(first, other, groups, environment, **bootstrap)
        for first, *others in grouped((entry.sampling, entry) for entry in scores).values()
        for other in others
    ]


def comparison_document(
    comparisons: Sequence[Comparison], header: Mapping[str, str], environment: Description = DEFAULT_DESCRIPTION
) -> Document:
    """Return a document: the compared evaluations, tables of differences, tasks gained and lost."""
    document: list[str | Table] = [
        "# Comparison on " + header["dataset"],
        "\n".join(f"- {name}: {value}" for name, value in header.items()),
        *comparison_tables(comparisons, environment),
    ]
    for item in comparisons:
        lines = []
        for title, changes in (("gained", item.gained), ("lost", item.lost)):
            listed = ", ".join(f"{task} ({old:.0%} to {new:.0%})" for task, old, new in changes) or "none"
            lines.append(f"- {len(changes)} tasks {title}: {listed}")
        document += [f"## {_title(item)}", "\n".join(lines)]
    return document


def comparison_tables(
    comparisons: Sequence[Comparison], environment: Description = DEFAULT_DESCRIPTION
) -> list[str | Table]:
    """Return a table of all comparisons, a line for each with lost rollouts, and a table of groups for each."""
    names = score_names(environment)
    columns = [column for name in names.values() for column in (f"{name} difference", "p")]
    rows = [
        [
            f"{item.second} against {item.first}",
            item.sampling,
            *(cell for key in names for cell in difference_cells(getattr(item, key), "+.1f")),
            f"{len(item.gained)} / {len(item.lost)}",
        ]
        for item in comparisons
    ]
    parts: list[str | Table] = [Table(["second against first", "sampling", *columns, "tasks gained / lost"], rows)]
    if lost := lost_lines(comparisons, environment):
        parts.append("\n".join(lost))
    for item in comparisons:
        if item.groups:
            parts += [f"### {_title(item)}, by environment and group", difference_table(item.groups)]
    return parts


def _title(item: Comparison) -> str:
    return f"{item.second} against {item.first}, {item.sampling}"
