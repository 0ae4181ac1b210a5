"""Reads a folder of runs for the page that lists them: of each its head and last figures, and on request one curve."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loop_formats.places import METRICS_FILE, distinct_names, run_meant
from loop_formats.run_files import COLLECTIONS
from loop_viewer.run_data import RunData, TokenizerReader, read_numbers
from loop_viewer.run_head import CONFIG, NODE_CONFIG, REPORT, is_at_work, run_head

DEEPEST = 3
"""Folders below the one that is asked for, in which runs are looked for."""
EVERYTHING = "*"
"""What stands for a run's name where the rollouts of all runs are looked at as those of one."""
EVALUATION = "evaluation"
SHOWN = ("reward", "success", "dev_success")
"""Of a run's metrics, what its row in the list shows; each as it stood last."""


def is_run(path: Path) -> bool:
    """Return whether a folder is a run, an evaluation or a node's, and no folder around some of them."""
    return (
        (path / METRICS_FILE).is_file()
        or (path / COLLECTIONS).is_dir()
        or any(found.is_dir() for found in path.glob(f"node*/{COLLECTIONS}"))
    )


def runs_below(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """Yield the runs in a folder, by name; what lies inside a run is not looked at."""
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
    """Several runs: those in a folder, or those that are named.

    Args:
        paths: one folder with runs somewhere in it, or runs.
        model, read_tokenizer: as of :class:`RunData`.

    Raises:
        ValueError: there is no run in the folder.
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
        """The runs that are there now, by the names that the page gives them."""
        if len(self._paths) == 1:
            return {path.relative_to(self.path).as_posix(): path for path in runs_below(self.path)}
        return dict(zip(distinct_names(self._paths), self._paths, strict=True))

    def run(self, name: str) -> RunData:
        """One of the runs; :data:`EVERYTHING` is all of them as one.

        Raises:
            KeyError: there is none of that name.
            ValueError: it cannot be shown.
        """
        if name not in self._opened:
            path, within = (self.path, self._paths) if name == EVERYTHING else (self.runs()[name], ())
            self._opened[name] = RunData(path, self._model, within, self._read_tokenizer)
        return self._opened[name]

    def overview(self) -> dict[str, Any]:
        """{"name", "runs", "whole", "quantities"}; a run that did not change is not read again.

        Each of ``runs`` has its ``name``, the fields of :func:`run_head`, ``iterations`` and the last of each of
        :data:`SHOWN`; ``held_out_success`` (0 to 1) of the policy that its evaluation scored last, ``held_out_policy``;
        or None for what it does not have. One that is damaged has an ``error`` instead. ``quantities`` are the metrics
        that are numbers in any of the runs. ``whole`` is :data:`EVERYTHING`.
        """
        runs = self.runs()
        self._opened = {name: run for name, run in self._opened.items() if name == EVERYTHING or name in runs}
        rows = [{"name": name, **self._row(name, path)} for name, path in runs.items()]
        quantities = sorted({key for row in rows for key in row.pop("quantities", ())})
        return {"name": self.name, "runs": rows, "whole": EVERYTHING, "quantities": quantities}

    def curves(self, quantity: str, names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """A run's name -> its lines of metrics.jsonl, each with no more than the quantity, and where it stands."""
        wanted = {"iteration", quantity, "dev_iteration", "earlier_dev_iteration", f"earlier_{quantity}"}
        found = {}
        for name, path in self.runs().items():
            if name in names and "error" not in self._row(name, path):
                found[name] = [{key: line[key] for key in wanted & line.keys()} for line in read_numbers(path, [])]
        return found

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        reports = (path / REPORT, path / EVALUATION / REPORT)
        runs = is_at_work(path)
        stamp = (
            runs,
            *(_stamp(file) for file in (*(path / each for each in (METRICS_FILE, CONFIG, NODE_CONFIG)), *reports)),
        )
        known = self._rows.get(path)
        if known is not None and known[0] == stamp and not runs:
            return dict(known[1])
        try:
            damage: list[str] = []
            lines = read_numbers(path, damage)
            # What waits to be collected or trained on is of interest while somebody works on it.
            head = self.run(name).head() if runs else run_head(path, (), lines)
            row = {
                **head,
                "damage": damage,
                "iterations": lines[-1]["iteration"] if lines else None,
                **{key: _last(lines, key) for key in SHOWN},
                **_held_out(reports),
                "quantities": {
                    key for key in set().union(*lines) if any(isinstance(line.get(key), int | float) for line in lines)
                },
            }
        except (OSError, ValueError) as error:
            row = {"error": str(error)}
        self._rows[path] = stamp, row
        return dict(row)


def _last(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The last number of that name, which the page writes as one."""
    return next((line[key] for line in reversed(lines) if isinstance(line.get(key), int | float)), None)


def _stamp(file: Path) -> object:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _held_out(reports: Sequence[Path]) -> Mapping[str, Any]:
    """What the first report that is there says of the policy that it scored last."""
    for file in reports:
        try:
            last = json.loads(file.read_text(encoding="utf-8"))["scores"][-1]
            return {"held_out_success": last["success"]["mean"] / 100, "held_out_policy": str(last["policy"])}
        except (OSError, LookupError, TypeError, ValueError):
            continue
    return {"held_out_success": None, "held_out_policy": ""}
