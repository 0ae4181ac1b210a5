"""Draws the use of a node's slots over time, from the files of its collections and the run's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from loop_formats.ids import parse_collection_id
from loop_formats.places import labelled_paths
from loop_formats.run_files import find_logs, meta_path, read_lines
from loop_formats.run_folder import read_metrics
from loop_plumbing.breakage import raised_as
from loop_recipes.plots.style import COLOURS


def slots_over_time(curves: Sequence[str]) -> Figure:
    """Plot how many episodes run and wait, in a column for the first run of each curve. An iteration's first request is
    marked with the seconds that it lost, each policy's first turn with a line, an evaluation with a grey band. Raises
    ValueError for a run without episodes or a damaged line."""
    runs = {label: paths[0] if paths[0].is_dir() else paths[0].parent for label, paths in labelled_paths(curves)}
    size = (6 * len(runs), 6)
    figure, grid = plt.subplots(2, len(runs), figsize=size, squeeze=False, sharex=True, sharey="row", layout="tight")
    for (slots, lost), (label, run) in zip(grid.T, runs.items(), strict=True):
        times, policies, datasets = dict[str, np.ndarray](), dict[int, float](), set[str]()
        with raised_as(ValueError, f"{run}: the files of a collection, perhaps of an earlier version, lack ", KeyError):
            for log in find_logs(run):
                records = [line.record for line in read_lines(log) if not line.record["segment"]]
                if len(spans := episode_times(log, records)):
                    times[log.stem] = spans
                datasets |= {record["dataset"] for record in records}
                if not parse_collection_id(log.stem).is_score:  # whose policies have no numbers of the run
                    for version, at in _turns(records):
                        policies[version] = min(at, policies.get(version, at))
        if not times:
            raise ValueError(f"{run}: no episode has ended yet, so there is nothing to draw")
        spans = np.concatenate([*times.values()])
        asked, began, ended = spans.T - spans.min()
        for name, colour, more, less in (("running", 0, began, ended), ("waiting for a slot", 1, asked, began)):
            moments, places = np.unique([more, less], return_inverse=True)
            count = np.bincount(places.ravel(), np.repeat([1, -1], len(more))).cumsum()
            slots.step(moments, count, where="post", color=COLOURS[colour], lw=1, label=name)
        names = {name: parse_collection_id(name) for name in times}
        first = {names[name].iteration: times[name].min() for name in reversed(times) if not names[name].dev}
        for key, name, colour in (("waiting", "the trainer waits", 2), ("paced", "the node may begin no group", 3)):
            if lines := [line for line in read_metrics(run) if f"seconds_{key}" in line]:
                at = np.array([first.get(line["iteration"], np.nan) for line in lines]) - spans.min()
                values = [line[f"seconds_{key}"] for line in lines]
                lost.plot(at, values, color=COLOURS[colour], marker="o", ms=4, label=name)
        for axes in (slots, lost):
            for number, at in enumerate(policies.values()):
                text = "a new policy's first turn" if axes is slots and not number else None
                axes.axvline(at - spans.min(), color="#555555", lw=0.8, ls=":", label=text)
            for number, score in enumerate(times[name] - spans.min() for name in times if names[name].is_score):
                text = "an evaluation" if axes is slots and not number else None
                axes.axvspan(score.min(), score.max(), color="#999999", alpha=0.25, lw=0, label=text)
        slots.set_title(f"{label}\n{', '.join(sorted(datasets))}", loc="left", fontsize=10, pad=40)
        slots.set_ylabel("episodes")
        lost.set(xlabel="seconds since the first request", ylabel="seconds of an iteration")
    for axes in grid.flat:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    return figure


def _turns(records: Sequence[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """Yield the policy version of each turn and the time when it began, in seconds since 1970."""
    for record in records:
        at = record["started_at"]
        for turn in record["turns"]:
            yield turn["policy_version"], at
            at += turn["sampling_seconds"] + turn["environment_seconds"]


def episode_times(log: Path, records: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return the times [n, 3] when each episode of a collection was requested, began and ended, in seconds since 1970;
    episodes that never began, or were lost, are left out. ``records`` are those of ``log``."""
    spans, opened = [(each["started_at"], each["started_at"] + each["seconds"]) for each in records], list[float]()
    for fact in (line.record for line in read_lines(meta_path(log.parent, log.stem))):
        opened += [fact["at"]] if "opened" in fact else []
        if "end" in fact:
            over = opened[-1] + fact["end"]["seconds"]
            spans += [(over - seconds, over) for seconds in fact["end"]["dropped_seconds"]]
    return np.array([(min([*opened[:1], began]), began, ended) for began, ended in spans])
