"""Says how many groups of rollouts of a run, a pilot or an evaluation have signal, or would have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loop_formats.places import METRICS_FILE
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.run.group_signal import Groups, coverage, groups_by_solved, signal_figures, solved_rate

MOST_GROUPS = 10**9
"""Number of groups that a line of a file may hold at most."""


def together(every: Iterable[Any]) -> Groups:
    """Merge the groups of several iterations. Leave out malformed counts, which a foreign file may hold."""
    merged: dict[str, dict[str, int]] = {}
    for key, counts in (item for groups in every if isinstance(groups, Mapping) for item in groups.items()):
        named = re.fullmatch(r"(\d{1,6})/([1-9]\d{0,5})", str(key))
        if named is None or int(named[1]) > int(named[2]) or not isinstance(counts, Mapping):
            continue
        if counts.keys() != {"groups", "with_signal"} or not all(type(each) is int for each in counts.values()):
            continue
        if not 0 <= counts["with_signal"] <= counts["groups"] <= MOST_GROUPS or not counts["groups"]:
            continue
        before = merged.setdefault(key, dict.fromkeys(counts, 0))
        merged[key] = {name: before[name] + count for name, count in counts.items()}
    return merged


def signal_text(groups: Groups) -> str:
    """Return a text that says how many groups had signal, by whether the task was solved never, sometimes or always."""
    parts = {"never solved": [0, 0], "solved sometimes": [0, 0], "always solved": [0, 0]}
    for key, counts in groups.items():
        counted = parts[{0.0: "never solved", 1.0: "always solved"}.get(solved_rate(key), "solved sometimes")]
        counted[:] = counted[0] + counts["with_signal"], counted[1] + counts["groups"]
    signal, total = (sum(counted[place] for counted in parts.values()) for place in (0, 1))
    shares = ", ".join(f"{some} of {of} {name}" for name, (some, of) in parts.items() if of)
    return f"{signal} of {total} groups had unequal rewards ({shares})"


def forecast(groups: Groups, size: int | None = None) -> list[str]:
    """Return texts: the share of tasks with signal by success in groups of ``size``, the size that gives it to four of
    five tasks that are solved sometimes, and other tasks to take for those that are solved always or never."""
    size_needed, total = signal_figures(groups).get("enough_rollouts"), sum(each["groups"] for each in groups.values())
    cures = {"always": (1.0, "take harder tasks"), "never": (0.0, "take easier ones, or demonstrations")}
    texts = [f"groups of {size} would give signal to {coverage(groups, size):.0%} of all tasks"] if size else []
    if size_needed is not None:
        texts.append(f"groups of {size_needed} would give signal to four of five tasks that are solved sometimes")
    for name, (rate, cure) in cures.items():
        if count := sum(each["groups"] for key, each in groups.items() if solved_rate(key) == rate):
            texts.append(f"{count} of {total} groups {name} solved: {cure}")
    return texts


def pilot_groups(folder: Path) -> Groups:
    """Read the groups of a training run, or the tasks of an evaluation's first policy.

    Raises:
        ConfigError: the folder is neither a training run nor an evaluation, or has no groups.
    """
    if (folder / METRICS_FILE).is_file():
        with raised_as(ConfigError, f"--pilot {folder}: ", ValueError, OSError):
            groups = together(line.get("groups_by_solved", {}) for line in read_metrics(folder))
    else:
        from loop_recipes.evaluation.report import read_report  # with its statistics, which no other check needs

        with raised_as(ConfigError, f"--pilot {folder}: ", ValueError, OSError):
            first = read_report(folder)[1][0]
        groups = groups_by_solved((each.task_id, each.success, float(each.success)) for each in first.results)
    groups = {key: each for key, each in groups.items() if not key.endswith("/1")}
    require(groups, f"--pilot {folder}: it has no groups of several rollouts; give a newer run, or an evaluation")
    return groups
