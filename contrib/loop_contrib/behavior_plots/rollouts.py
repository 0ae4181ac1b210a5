"""Pictures of what agents wrote: behaviour early against late in training, and how much the rollouts of a task differ.

Reads the logs of collections. For a training run, compares the first tenth of its iterations with the last (as LOOP
does, in its figure on behaviour); for anything else, the collection that began first with the last one that was
sampled at the same temperature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.typing import ColorType

from agent_environments.agent_turns import agent_turns
from agent_environments.description import BehaviorFigure
from loop_formats.ids import parse_collection_id
from loop_formats.run_files import find_logs, read_lines
from loop_formats.run_folder import groups_taken, read_description
from loop_plumbing.grouping import grouped
from loop_recipes.plots.style import COLOURS, panels, save

MAX_DEPTH = 24
RESAMPLES = 2000
SOLVED: dict[str, Any] = {"ls": "", "marker": "o", "ms": 4, "mew": 0, "color": "#1a7f4b"}
"""The mark of a rollout that solved its task."""


@dataclass(frozen=True)
class PlottedAttempt:
    """The part of a rollout that the figures need. ``index`` numbers a task's rollouts; ``behavior`` holds counts."""

    task_id: str
    index: int
    success: bool
    behavior: dict[str, int]
    calls: tuple[str, ...]


@dataclass(frozen=True)
class Period:
    """The attempts of one or more collections, with the name that the figures show."""

    name: str
    attempts: list[PlottedAttempt]


def read_attempts(log: Path) -> list[PlottedAttempt]:
    """Read the episodes of a collection's log. Raises a ValueError that names the line if a line is damaged."""
    environment = read_description(log)
    attempts = []
    for _, lines in groupby(read_lines(log), key=lambda line: line.record["episode_id"]):
        records = [line.record for line in lines]
        sequences = []
        for record in records:
            acts = [turn["message"] for turn in record["turns"] if not turn.get("summary")]
            sequences.append((record["messages"], agent_turns(record["messages"], acts)))
        task, first = records[0]["task_id"], records[0]
        calls = [call for messages, turns in sequences for call in environment.calls(task, messages, turns)]
        counts = environment.counts(task, sequences)
        attempts.append(PlottedAttempt(task, first["index"], first["success"], counts, tuple(calls)))
    return attempts


def read_periods(run: Path) -> tuple[str, list[Period]]:
    """Return the dataset and the periods: early and late for the folder of a run or an evaluation, one for a log.

    Raises:
        ValueError: the folder has no rollouts.
    """
    logs = [log for log in find_logs(run) if any(read_lines(log))]
    if not logs:
        raise ValueError(f"{run} holds no rollouts: there is no collections/*.jsonl")
    names = {log: parse_collection_id(log.stem) for log in logs}
    taken = groups_taken(run)
    known = [
        (taken.get(log.stem) if taken and name.group is not None else name.iteration, log)
        for log, name in names.items()
        if name.is_training
    ]
    training = grouped((number, log) for number, log in known if number is not None)
    if training:
        numbers = sorted(training)
        count = max(1, len(numbers) // 10)
        spans = [numbers[:count], numbers[-count:]] if len(numbers) > 1 else [numbers]
        groups = {_iterations(span): [log for number in span for log in training[number]] for span in spans}
        periods = [Period(name, _attempts(group)) for name, group in groups.items()]
    else:
        by_length = sorted(logs, key=lambda log: len(log.stem))  # tasks asked for by themselves after the others
        scores = grouped((names[log].score or log.stem, log) for log in by_length)
        began = {log: next(read_lines(log)).record for log, *_ in scores.values()}
        order = sorted(scores.values(), key=lambda group: (began[group[0]]["started_at"], group[0].stem))
        alike = [group for group in order if began[group[0]]["temperature"] == began[order[0][0]]["temperature"]]
        periods = []
        for log, *alone in alike[:1] + alike[1:][-1:]:
            attempts = _attempts([log, *alone])
            periods.append(Period(names[log].name, _each_once(attempts) if alone else attempts))
    return next(read_lines(logs[0])).record["dataset"], periods


def _attempts(logs: Sequence[Path]) -> list[PlottedAttempt]:
    return [item for log in logs for item in read_attempts(log)]


def _each_once(attempts: Sequence[PlottedAttempt]) -> list[PlottedAttempt]:
    """Return the first attempt of each (task, index). A task requested alone has one attempt from each request."""
    return list({(item.task_id, item.index): item for item in reversed(attempts)}.values())[::-1]


def behavior_interval(attempts: Sequence[PlottedAttempt], figure: BehaviorFigure) -> tuple[float, float]:
    """Return a figure's 95% percentile bootstrap interval (low, high). Whole tasks are resampled, with all rollouts."""
    attempts = [attempt for attempt in attempts if figure.of in attempt.behavior]
    tasks = sorted({attempt.task_id for attempt in attempts})
    sums = np.zeros((len(tasks), 2))
    for attempt in attempts:
        counts = attempt.behavior
        amount = counts[figure.of] - (counts[figure.less] if figure.less else 0)
        sums[tasks.index(attempt.task_id)] += [amount, counts[figure.per] if figure.per else 1]
    draws = np.random.default_rng(0).multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), size=RESAMPLES)
    amounts, wholes = (draws @ sums).T
    if figure.empty is None:
        amounts, wholes = amounts[wholes > 0], wholes[wholes > 0]
    low, high = np.quantile(amounts / np.maximum(wholes, 1), [0.025, 0.975])
    return float(low), float(high)


def behavior_change(periods: Sequence[Period], dataset: str, measured: Sequence[BehaviorFigure]) -> Figure:
    """Draw a panel for each measured figure. A panel has a bar with its interval for each period; its title shows the
    change. The largest number of a panel decides how many decimals its numbers have."""
    figure, grid = panels(len(measured), width=14)
    for axes, each in zip(grid.flat, measured, strict=False):
        values = [each.value([item.behavior for item in period.attempts]) for period in periods]
        decimals = _decimals(max((abs(value) for value in values if value is not None), default=0.0))
        for place, (period, value) in enumerate(zip(periods, values, strict=True)):
            if value is None:
                axes.text(place, 0, each.undefined, ha="center", va="bottom", fontsize=8, color="#666666")
                continue
            low, high = behavior_interval(period.attempts, each)
            error = [[max(value - low, 0.0)], [max(high - value, 0.0)]]
            axes.bar(place, value, 0.6, color=COLOURS[place], yerr=error, capsize=4, ecolor="#444444")
            beside: dict[str, Any] = {"textcoords": "offset points", "ha": "left", "va": "bottom", "fontsize": 9}
            axes.annotate(f"{value:.{decimals}f}", (place, value), (4, 1), **beside)  # the bar's, not the whisker's end
        axes.set_title(each.title + _change(values), fontsize=10)
        axes.set_xticks(range(len(periods)), [period.name for period in periods], fontsize=9)
        axes.set_xlim(-0.6, len(periods) - 0.4)
        axes.margins(y=0.15)
        axes.set_ylim(0, None if any(values) else 1)
    counts = ", ".join(f"{period.name}: {len(period.attempts)} rollouts" for period in periods)
    figure.suptitle(f"{dataset}\n{counts}; whiskers: 95% bootstrap interval over tasks", fontsize=10, x=0.01, ha="left")
    figure.tight_layout()
    return figure


def call_sequences(periods: Sequence[Period], task: str, dataset: str) -> Figure:
    """Draw the API calls of a task's rollouts as a prefix tree. Columns are calls; rollouts with the same first calls
    share a box. A point after the last call marks a rollout that solved the task."""
    drawn = [Period(p.name, [item for item in p.attempts if item.task_id == task]) for p in periods]
    drawn = [period for period in drawn if period.attempts]
    counts = Counter(call for period in drawn for item in period.attempts for call in item.calls[:MAX_DEPTH])
    colours = dict(zip((call for call, _ in counts.most_common()), _distinct_colours(len(counts)), strict=True))
    rows = max(len(period.attempts) for period in drawn)
    depth = max((min(len(item.calls), MAX_DEPTH) for period in drawn for item in period.attempts), default=1)
    figure, grid = plt.subplots(
        1, len(drawn), figsize=(max(6.0, 0.62 * depth + 2.5) * len(drawn), max(3.5, 0.16 * rows + 2.2)), squeeze=False
    )
    for axes, period in zip(grid[0], drawn, strict=True):
        ordered = sorted(period.attempts, key=lambda item: item.calls)
        _draw_tree(axes, ordered, 0, 0, colours)
        for row, item in enumerate(ordered):
            if item.success:
                axes.plot(min(len(item.calls), MAX_DEPTH) + 0.25, row + 0.5, **SOLVED)
        unique, first = len({item.calls for item in ordered}), len({item.calls[:1] for item in ordered})
        kinds = f": {_counted(unique, 'sequence')} of calls, {_counted(first, 'first call')}" * (len(ordered) > 1)
        axes.set_title(f"{period.name}, {_counted(len(ordered), 'rollout')}{kinds}", fontsize=10)
        axes.set(xlim=(0, depth + 0.5), ylim=(len(ordered), 0), xlabel="API call")
        axes.set_xticks(np.arange(depth) + 0.5, np.arange(1, depth + 1), fontsize=8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    handles: list[Artist] = [Rectangle((0, 0), 1, 1, color=colours[call]) for call, _ in counts.most_common(12)]
    labels = [f"{call} ({count})" for call, count in counts.most_common(12)]
    handles, labels = [*handles, Line2D([], [], **SOLVED)], [*labels, "solved"]
    figure.legend(handles, labels, loc="lower left", ncols=3, fontsize=7, frameon=False)
    figure.suptitle(f"{dataset}: task {task}", fontsize=10, x=0.01, ha="left")
    figure.tight_layout(rect=(0, (0.2 * -(-len(labels) // 3) + 0.1) / figure.get_figheight(), 1, 1))
    return figure


def write_rollout_figures(run: Path, output: Path, task: str | None = None) -> list[Path]:
    """Write both figures as PNG and SVG and return the paths. Without measurements there is no figure of behaviour,
    without calls none of them.

    Args:
        task: the task to draw; None takes the task with most rollouts and sequences, if possible from both periods.

    Raises:
        ValueError: no rollouts, or none of that task; or nothing to draw, since there are neither measurements nor
            calls.
    """
    dataset, periods = read_periods(run)
    sequences = grouped((item.task_id, item.calls) for period in periods for item in period.attempts)
    if task is None:
        counts = Counter(name for period in periods for name in {item.task_id for item in period.attempts})
        task = max(sorted(sequences), key=lambda name: (counts[name], len(sequences[name]), len(set(sequences[name]))))
    if task not in sequences:
        raise ValueError(f"no rollout of task {task!r} in {' or '.join(period.name for period in periods)} of {run}")
    counted = {name for period in periods for item in period.attempts for name in item.behavior}
    measured = [figure for figure in read_description(run).figures if figure.of in counted]
    written = save(behavior_change(periods, dataset, measured), output, "behavior_change") if measured else []
    if any(sequences[task]):
        written += save(call_sequences(periods, task, dataset), output, "call_sequences")
    if not written:
        raise ValueError(f"no tool was called for task {task}, and nothing else is measured; loop view {run} has texts")
    return written


def _draw_tree(
    axes: Axes, ordered: Sequence[PlottedAttempt], row: int, depth: int, colours: dict[str, ColorType]
) -> None:
    """Draw the boxes of call ``depth`` and of all later calls. The rollouts ``ordered`` share all calls before it."""
    for call, group in groupby(ordered, key=lambda item: item.calls[depth : depth + 1]):
        alike = list(group)
        if call and depth < MAX_DEPTH:
            box = Rectangle((depth, row), 1, len(alike), facecolor=colours[call[0]], edgecolor="white", lw=0.8)
            axes.add_patch(box)
            if len(alike) > 1:
                axes.text(depth + 0.5, row + len(alike) / 2, str(len(alike)), ha="center", va="center", fontsize=7)
            _draw_tree(axes, alike, row, depth + 1, colours)
        row += len(alike)


def _counted(count: int, what: str) -> str:
    """Return a number with its noun: "1 rollout", "2 rollouts"."""
    return f"{count} {what}{'s' * (count != 1)}"


def _decimals(largest: float) -> int:
    """Return how many decimals are needed to show three digits of a number."""
    return max(0, 2 - math.floor(math.log10(largest))) if largest else 0


def _distinct_colours(count: int) -> list[ColorType]:
    """Return ``count`` colours: first the seven that all figures use, then lighter shades from a colour wheel."""
    wheel = [plt.get_cmap("hsv", max(count, 8))(number) for number in range(max(0, count - len(COLOURS)))]
    lighter = [(0.45 + 0.5 * red, 0.45 + 0.5 * green, 0.45 + 0.5 * blue) for red, green, blue, _ in wheel]
    return [*COLOURS[:count], *lighter]


def _change(values: Sequence[float | None]) -> str:
    """Return the relative change from the first value to the last, such as " (+12%)"; "" if it is undefined."""
    if len(values) < 2 or values[0] is None or values[-1] is None or not values[0]:
        return ""
    return f" ({100 * (values[-1] / values[0] - 1):+.0f}%)"


def _iterations(numbers: Sequence[int]) -> str:
    return f"iteration {numbers[0]}" if len(numbers) == 1 else f"iterations {numbers[0]}-{numbers[-1]}"
