"""Two evaluations of the same tasks, compared task by task: differences, their intervals, a permutation test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from appworld_adapter.dataset import scenario_of
from loop_recipes.evaluation.scores import TaskResult, scenario_rates, success_rates, success_table
from loop_recipes.evaluation.statistics import Interval, difference_interval, permutation_p_value


@dataclass(frozen=True)
class Difference:
    """Second minus first, in percentage points, with its bootstrap interval and the p-value of "no difference"."""

    interval: Interval
    p_value: float


@dataclass(frozen=True)
class Comparison:
    """``gained`` and ``lost`` hold (task id, success rate of the first, of the second), largest change first."""

    first: str
    second: str
    sampling: str
    tasks: int
    tgc: Difference
    sgc: Difference
    gained: list[tuple[str, float, float]]
    lost: list[tuple[str, float, float]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class NamedResults:
    """The results of one score: who, sampled how, and every attempt."""

    name: str
    sampling: str
    results: Sequence[TaskResult]


def compare(
    first: NamedResults, second: NamedResults, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Compare paired by task (TGC) and by scenario (SGC); rates over several runs are averaged per task first.

    Raises:
        ValueError: the two are not over the same tasks.
    """
    tables = [success_table(side.results) for side in (first, second)]
    before, after = (success_rates(table) for table in tables)
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(
            f"{first.name} and {second.name} are not over the same tasks: {len(odd)} are in only one, such as {odd[0]}"
        )
    scenarios_before, scenarios_after = (scenario_rates(table) for table in tables)
    bootstrap: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
    tasks = {task: after[task] - before[task] for task in before}
    scenarios = {name: scenarios_after[name] - scenarios_before[name] for name in scenarios_before}
    changes = sorted(tasks, key=lambda task: (-abs(tasks[task]), task))
    return Comparison(
        first=first.name,
        second=second.name,
        sampling=first.sampling,
        tasks=len(tasks),
        tgc=Difference(
            difference_interval(tasks, scenario_of, **bootstrap).scaled(100.0),
            permutation_p_value(tasks, scenario_of, seed=seed),
        ),
        sgc=Difference(
            difference_interval(scenarios, str, **bootstrap).scaled(100.0),
            permutation_p_value(scenarios, str, seed=seed),
        ),
        gained=[(task, before[task], after[task]) for task in changes if tasks[task] > 0],
        lost=[(task, before[task], after[task]) for task in changes if tasks[task] < 0],
    )


def compare_with_first(
    scores: Sequence[NamedResults], *, level: float = 0.95, resamples: int = 10_000
) -> list[Comparison]:
    """For every way of sampling: the first that used it against each other one."""
    groups: dict[str, list[NamedResults]] = {}
    for entry in scores:
        groups.setdefault(entry.sampling, []).append(entry)
    return [
        compare(group[0], other, level=level, resamples=resamples) for group in groups.values() for other in group[1:]
    ]


def comparison_markdown(comparisons: Sequence[Comparison], header: Mapping[str, str]) -> str:
    """A document: what is compared, a table of differences, tasks gained and lost."""
    lines = ["# Comparison on " + header["dataset"], ""]
    lines += [f"- {name}: {value}" for name, value in header.items()]
    lines += ["", *comparison_table(comparisons)]
    for item in comparisons:
        lines += ["", f"## {item.second} against {item.first}, {item.sampling}", ""]
        for title, changes in (("gained", item.gained), ("lost", item.lost)):
            listed = ", ".join(f"{task} ({old:.0%} to {new:.0%})" for task, old, new in changes) or "none"
            lines.append(f"- {len(changes)} tasks {title}: {listed}")
    return "\n".join(lines) + "\n"


def comparison_table(comparisons: Sequence[Comparison]) -> list[str]:
    """Markdown rows: one per comparison."""
    rows = [
        "| second against first | sampling | TGC difference | p | SGC difference | p | tasks gained / lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for item in comparisons:
        cells = [f"{item.second} against {item.first}", item.sampling]
        for difference in (item.tgc, item.sgc):
            interval = difference.interval
            cells.append(f"{interval.estimate:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]")
            cells.append(f"{difference.p_value:.3g}")
        cells.append(f"{len(item.gained)} / {len(item.lost)}")
        rows.append("| " + " | ".join(cells) + " |")
    return rows
