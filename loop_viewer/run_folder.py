"""Reads a folder of runs for the page that lists them: each run's head and last figures, and on request one curve."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loop_formats.places import METRICS_FILE, distinct_names, run_meant
from loop_formats.run_files import COLLECTIONS
from loop_viewer.run_data import RunData, TokenizerReader
from loop_viewer.run_head import CONFIG, NODE_CONFIG, REPORT, is_at_work, run_head
from loop_viewer.run_lines import read_numbers
from loop_viewer.run_record import EVALUATION, result_of, setting_of

MAX_DEPTH = 3
"""Levels of folders below the viewer's folder in which runs are searched."""
EVERYTHING = "*"
"""The name of a run that has the rollouts of all runs."""
LISTED_METRICS = ("reward", "success", "dev_success")
"""The metrics that a run's row in the list shows, each with its last value."""


def is_run(path: Path) -> bool:
    """Return whether a folder belongs to one run, evaluation or node, and is not a folder that contains several."""
    return (
        (path / METRICS_FILE).is_file()
        or (path / COLLECTIONS).is_dir()
        or any(collections.is_dir() for collections in path.glob(f"node*/{COLLECTIONS}"))
    )


def runs_below(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the runs in a folder, by name, without looking inside a run."""
    try:
        within = sorted(Path(entry) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError:  # not ours to read, or gone
        return
    for path in within:
        if is_run(path):
            yield path
        elif depth > 1:
            yield from runs_below(path, depth - 1)


class RunFolder:
    """Several runs: all runs in a folder, or the given runs.

    Args:
        paths: one folder with runs somewhere in it, or runs.
        model, read_tokenizer: as in :class:`RunData`.

    Raises:
        ValueError: the folder holds no run.
    """

    def __init__(
        self, paths: Sequence[Path], model: Path | None = None, read_tokenizer: TokenizerReader | None = None
    ) -> None:
        self._paths = [path.resolve() for path in paths]
        self._model, self._read_tokenizer = model, read_tokenizer
        self._opened: dict[str, RunData] = {}
        self._rows: dict[Path, tuple[object, dict[str, Any]]] = {}
        self.path = Path(os.path.commonpath(self._paths))
        for path in paths:
            if not path.exists():
                raise ValueError(f"{path} does not exist{run_meant(path)}")
        if not self.runs():
            raise ValueError(f"{paths[0]} holds no run: neither {COLLECTIONS}/*.jsonl nor {METRICS_FILE}")

    @property
    def name(self) -> str:
        return self.path.name

    def runs(self) -> dict[str, Path]:
        """Return the folders of the runs, listed now, by their names on the page."""
        if len(self._paths) == 1:
            return {path.relative_to(self.path).as_posix(): path for path in runs_below(self.path)}
        return dict(zip(distinct_names(self._paths), self._paths, strict=True))

    def run(self, name: str) -> RunData:
        """Return the run of a name; the name :data:`EVERYTHING` stands for all runs together.

        Raises:
            KeyError: no run has that name.
            ValueError: the run cannot be shown.
        """
        if name not in self._opened:
            path, within = (self.path, self._paths) if name == EVERYTHING else (self.runs()[name], ())
            self._opened[name] = RunData(path, self._model, within, self._read_tokenizer)
        return self._opened[name]

    def overview(self) -> dict[str, Any]:
        """Return {"name", "runs", "whole", "quantities"}; a run that did not change is not read again.

        Each of ``runs`` has its ``name``, the fields of :func:`run_head`, ``iterations``, the last value of each of
        :data:`LISTED_METRICS`, and ``held_out_success`` (0 to 1) of ``held_out_policy``, the policy that its evaluation
        scored last. Missing values are None. Runs with equal :func:`setting_of` have the same ``setting``. A damaged
        run has an ``error`` instead. ``quantities`` are the metrics that are numbers in any of the runs. ``whole`` is
        :data:`EVERYTHING`.
        """
        runs = self.runs()
        self._opened = {name: run for name, run in self._opened.items() if name == EVERYTHING or name in runs}
        rows = [{"name": name, **self._row(name, path)} for name, path in runs.items()]
        quantities = sorted({key for row in rows for key in row.pop("quantities", ())})
        return {"name": self.name, "runs": rows, "whole": EVERYTHING, "quantities": quantities}

    def curves(self, quantity: str, names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Return run's name -> lines of metrics.jsonl, each reduced to the iteration and the quantity."""
        wanted = {"iteration", quantity, "dev_iteration", "earlier_dev_iteration", f"earlier_{quantity}"}
        curves = {}
        for name, path in self.runs().items():
            if name in names and "error" not in self._row(name, path):
                curves[name] = [{key: line[key] for key in wanted & line.keys()} for line in read_numbers(path, [])]
        return curves

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        runs = is_at_work(path)
        stamp = (
            runs,
            *(_stamp(path / name) for name in (METRICS_FILE, CONFIG, NODE_CONFIG, REPORT, f"{EVALUATION}/{REPORT}")),
        )
        known = self._rows.get(path)
        if known is not None and known[0] == stamp and not runs:
            return dict(known[1])
        try:
            damage: list[str] = []
            lines = read_numbers(path, damage)
            # Collections that wait for rollouts or for training matter only while a process works on the run.
            head = self.run(name).head() if runs else run_head(path, (), lines)
            scored = next(reversed(result_of(path).get("scores", [])), None)
            row = {
                **head,
                "damage": damage,
                "iterations": lines[-1]["iteration"] if lines else None,
                **{key: _last(lines, key) for key in LISTED_METRICS},
                "held_out_success": scored and scored["mean"] / 100,
                "held_out_policy": scored["policy"] if scored else "",
                "setting": setting_of(path),
                "quantities": {
                    key for key in set().union(*lines) if any(isinstance(line.get(key), int | float) for line in lines)
                },
            }
        except (OSError, ValueError) as error:
            row = {"error": str(error)}
        self._rows[path] = stamp, row
        return dict(row)


def _last(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the last value of a metric that is a number, for the page."""
    return next((line[key] for line in reversed(lines) if isinstance(line.get(key), int | float)), None)


def _stamp(file: Path) -> object:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
