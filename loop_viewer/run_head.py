"""What stands at the head of a run's page: what is trained, how, how far it is, and how long it will still take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loop_formats.folder_lock import is_locked
from loop_formats.run_files import meta_path, read_lines

RUN_LOCK = "run.lock"
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, which is ten times as fast, where PyYAML was built with it."""
CONFIG, REPORT, NODE_CONFIG = "config.yaml", "report.json", "rollout_node.yaml"


@dataclass(frozen=True)
class ListedCollection:
    """What a collection's meta file says of it.

    ``wanted`` are the rollouts that were asked for; ``ended`` says whether no more of them will come; ``failures`` are
    the failed attempts, {task: {reason: count}}.
    """

    wanted: int
    ended: bool
    failures: dict[str, dict[str, int]]

    @classmethod
    def of(cls, log: Path) -> ListedCollection:
        """Read the file beside ``log``; without one, the collection has ended and nothing failed."""
        meta = meta_path(log.parent, log.stem)
        failures: dict[str, dict[str, int]] = {}
        wanted, ended = 0, not meta.is_file()
        for line in read_lines(meta) if meta.is_file() else ():
            match line.record:
                case {"request": {"tasks": list(tasks), "rollouts_per_task": int(each), **further}}:
                    branches = further.get("branches")
                    wanted = each * len(branches if isinstance(branches, list) and branches else tasks)
                case {"failure": {"task_id": str(task), "reason": str(reason)}}:
                    counts = failures.setdefault(task, {})
                    counts[reason] = counts.get(reason, 0) + 1
                case {"end": _}:
                    ended = True
        return cls(wanted, ended, failures)


def run_head(
    folder: Path, collections: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """{"model", "algorithm", "dataset", "state", "runs", "seconds_left"} of a training run or an evaluation.

    Args:
        folder: the run's; what it does not say is "" or None.
        collections: as :meth:`RunData.overview` lists them.
        lines: of metrics.jsonl.

    ``runs`` says whether a process works on the folder now, and only then ``seconds_left`` is a number: those of the
    last iteration, for each that is left.
    """
    config = _yaml(folder / CONFIG)
    runs = is_locked(folder, RUN_LOCK)
    model = _part(config, "model", "path") or _part(_yaml(folder / NODE_CONFIG), "model", "path")
    parts = [_part(config, name, "_component_").rpartition(".")[2] for name in ("advantage", "loss")]
    last, total = lines[-1] if lines else {}, config.get("max_iterations")
    left = None
    if runs and isinstance(total, int) and isinstance(last.get("seconds"), int | float):
        left = last["seconds"] * max(0, total - last["iteration"])
    return {
        "model": Path(model).name,
        "algorithm": ", ".join(filter(None, parts)),
        "dataset": str(last.get("dataset", "")),
        "state": _state(runs, (folder / REPORT).is_file(), total, last.get("iteration", 0), collections),
        "runs": runs,
        "seconds_left": left,
    }


def _state(runs: bool, reported: bool, total: object, done: int, collections: Sequence[Mapping[str, Any]]) -> str:
    """Return what is going on, in a few words."""
    of = f" of {total}" if isinstance(total, int) else ""
    if not runs:
        if reported or (done and done == total):
            return "ended"
        return f"stopped after iteration {done}{of}" if done else "not running"
    # A collection that a run left behind when it went back to a checkpoint is of an iteration that is done.
    coming = [item for item in collections if item["kind"] != "training" or item["iteration"] > done]
    open_ = [item for item in coming if not item["ended"] and item["kind"] != "continuation"]
    if open_:
        item = open_[-1]
        if item["totals"] is None and item["bytes"]:  # too large to be read for a number
            return f"{item['name']}: collecting"
        return f"{item['name']}: collecting {item['totals']['rollouts'] if item['totals'] else 0}/{item['wanted']}"
    if any(item["kind"] == "training" for item in coming):
        return f"iteration {done + 1}{of}: updating"
    return f"iteration {done + 1}{of}: begins" if isinstance(total, int) else "at work"


def _yaml(file: Path) -> dict[str, Any]:
    """Read a file as data; one that is missing or damaged says nothing."""
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), _SafeLoader) if file.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _part(config: Mapping[str, Any], name: str, key: str) -> str:
    part = config.get(name)
    return str(part.get(key) or "") if isinstance(part, dict) else ""
