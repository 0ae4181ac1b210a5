"""Reads the facts in a run's folder: its metrics, its tokens' statistics, its environment's description."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_formats.places import METRICS_FILE, run_meant
from loop_formats.run_files import STREAM_FILE, in_order, read_lines, to_json, write_whole

ENVIRONMENT_FILE = "environment.json"
FOLDERS_ABOVE = 3
"""Folders above a log in which its run is searched: a log lies in ``<run>/node/collections``."""
TOKEN_STATISTICS = "token_statistics"
"""The folder of token statistics in a run's folder."""


def write_description(folder: Path, environment: Description) -> Path:
    """Write the environment's description, whole or not at all; returns the path."""
    return write_whole(folder / ENVIRONMENT_FILE, to_json(asdict(environment), indent=1) + "\n")


def read_description(path: Path) -> Description:
    """Return the environment of a run, from its folder or a file in it; :data:`DEFAULT_DESCRIPTION` if none is stored.

    Raises:
        ValueError: the file is damaged; the message names it.
    """
    path = path.resolve()
    for folder in (path, *path.parents[:FOLDERS_ABOVE]):
        file = folder / ENVIRONMENT_FILE
        if file.is_file():
            try:
                return Description.from_dict(json.loads(file.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ValueError(f"{file} is damaged: {error}; remove it") from error
    return DEFAULT_DESCRIPTION


def groups_taken(path: Path) -> dict[str, int]:
    """Return collection -> the iteration that took it, for the groups of a stream in the folder of a run or below it,
    in the order in which they were taken; {} without a ``stream.jsonl``.

    Raises:
        ValueError: the file is damaged; the message names the line.
    """
    path = path.resolve()
    files = [folder / STREAM_FILE for folder in (path, *path.parents[:FOLDERS_ABOVE])]
    taken: dict[str, int] = {}
    for line in next((read_lines(file) for file in files if file.is_file()), ()):
        match line.record:
            case {"taken": {"group": str(group), "iteration": int(iteration)}}:
                taken[group] = iteration
    return taken


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the iterations of a run, in order, from its folder or its metrics.jsonl; the run may still be writing.

    Raises:
        ValueError: the file is missing, or a whole line is not a line of metrics; the message names the line.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file() or file.suffix != ".jsonl":
        raise ValueError(f"{path} is not a training run: it has no {METRICS_FILE}{run_meant(path)}")
    lines = []
    for line in read_lines(file):
        if not isinstance(line.record.get("iteration"), int):
            raise ValueError(f"{file}:{line.number} is not a line of metrics: it has no iteration")
        # A whole number too large for a float, as a stranger's file may have it, fails in every computation.
        lines.append({key: each for key, each in line.record.items() if not isinstance(each, int) or abs(each) < 1e300})
    return lines


def nothing_learned(run: Path) -> str | None:
    """Return a line if a run has iterations but none made an optimizer step; else None.

    Raises:
        ValueError: as :func:`read_metrics`.
    """
    lines = read_metrics(run)
    if not lines or any(line.get("steps", 1) for line in lines):
        return None
    return (
        f"nothing was learned: no step was made in {len(lines)} iterations, because no rollout was kept; for that the "
        f"rewards of a task have to differ (loop doctor {run})"
    )


def statistics_files(folder: Path, collection_id: str) -> list[Path]:
    """Return the files that the ranks have written about a collection, rank 0 first."""
    own = folder / f"{collection_id}.jsonl"
    return [file for file in (own, *in_order(folder.glob(f"{collection_id}.rank*.jsonl"))) if file.is_file()]
