"""Two evaluations of the same tasks, compared task by task: differences, their intervals, a permutation test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_recipes.evaluation.groups import GroupDifference, compare_groups, difference_cells, difference_table
from loop_recipes.evaluation.scores import TaskResult, group_rates, score_bounds, success_rates, success_table
from loop_recipes.evaluation.statistics import Difference, paired_difference
from loop_recipes.evaluation.success import score_names
from loop_recipes.evaluation.tables import Document, Table


@dataclass(frozen=True)
class Comparison:
    """Second minus first; both scores in percentage points.

    Over the tasks of which both have a rollout, ``tasks`` of them. ``gained`` and ``lost`` hold (task id, success rate
    of the first, of the second), largest change first. ``lost_rollouts`` is how many either side is without, and
    ``success_bounds`` and ``group_success_bounds`` are the smallest and the largest difference that they could have
    made; None where there are none.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class NamedResults:
    """The results of one score: who, sampled how, and every attempt."""

    name: str
    sampling: str
    results: Sequence[TaskResult]


def compare(
    first: NamedResults,
    second: NamedResults,
    groups: Mapping[str, Sequence[str]] | None = None,
    environment: Description = DEFAULT_DESCRIPTION,
    **bootstrap: Any,
) -> Comparison:
    """Compare paired by task, and by group of tasks; rates over several runs are averaged per task first.

    Args:
        groups: name -> its tasks, which are compared by themselves too.
        environment: says which group a task belongs to.
        bootstrap: of :func:`~loop_recipes.evaluation.statistics.rate_interval`.

    Raises:
        ValueError: the two are not over the same tasks, or have no task in common that was not lost.
    """
    asked = [{result.task_id for result in side.results} for side in (first, second)]
    if odd := sorted(asked[0] ^ asked[1]):
        raise ValueError(
            f"{first.name} and {second.name} are not over the same tasks: {len(odd)} are in only one, such as {odd[0]}"
        )
    tables = [success_table(side.results) for side in (first, second)]
    both = set.intersection(*({task for run in table for task in run} for table in tables))
    if not both:
        raise ValueError(f"{first.name} and {second.name} have no task in common that was not lost")
    tables = [[{task: run[task] for task in run if task in both} for run in table] for table in tables]
    before, after = (success_rates(table) for table in tables)
    groups_before, groups_after = (group_rates(table, environment) for table in tables)
    lost = tuple(sum(result.lost for result in side.results) for side in (first, second))
    bounds = [score_bounds(side.results, environment) for side in (first, second)] if any(lost) else []
    tasks = {task: after[task] - before[task] for task in before}
    whole_groups = {name: groups_after[name] - groups_before[name] for name in groups_before}
    changes = sorted(tasks, key=lambda task: (-abs(tasks[task]), task))
    return Comparison(
        first=first.name,
        second=second.name,
        sampling=first.sampling,
        tasks=len(tasks),
        success=paired_difference(tasks, environment.group_of, **bootstrap).scaled(100.0),
        group_success=paired_difference(whole_groups, str, **bootstrap).scaled(100.0),
        gained=[(task, before[task], after[task]) for task in changes if tasks[task] > 0],
        lost=[(task, before[task], after[task]) for task in changes if tasks[task] < 0],
        groups=compare_groups(first.results, second.results, groups or {}, environment, **bootstrap),
        lost_rollouts=(lost[0], lost[1]),
        success_bounds=_difference_bounds(*(each.success for each in bounds)) if bounds else None,
        group_success_bounds=_difference_bounds(*(each.group_success for each in bounds)) if bounds else None,
    )


def _difference_bounds(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return second[0] - first[1], second[1] - first[0]


def lost_lines(comparisons: Sequence[Comparison], environment: Description = DEFAULT_DESCRIPTION) -> list[str]:
    """Return a line for each difference with the bounds that the losses of either side leave; none where nothing was
    lost."""
    names = score_names(environment)

    def ranges(item: Comparison) -> str:
        bounds = {name: getattr(item, f"{key}_bounds") for key, name in names.items()}
        said = ", ".join(f"the {name} difference in [{low:+.1f}, {high:+.1f}]" for name, (low, high) in bounds.items())
        return said.replace(" difference in ", " difference would lie in ", 1)

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
    """For every way of sampling: the first that used it against each other one."""
    samplings: dict[str, list[NamedResults]] = {}
    for entry in scores:
        samplings.setdefault(entry.sampling, []).append(entry)
    return [
        compare(first, other, groups, environment, **bootstrap)
        for first, *others in samplings.values()
        for other in others
    ]


def comparison_document(
    comparisons: Sequence[Comparison], header: Mapping[str, str], environment: Description = DEFAULT_DESCRIPTION
) -> Document:
    """Return a document: what is compared, tables of differences, tasks gained and lost."""
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
    """Return a table of all comparisons, a line for each that lost rollouts, and a table of each one's groups."""
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
