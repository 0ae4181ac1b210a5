"""The head of a run's page: its model, algorithm and data, its state, and the seconds that it will still take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loop_formats.folder_lock import is_locked
from loop_formats.run_files import meta_path
from loop_viewer.sound_lines import json_object, sound_lines

RUN_LOCK = "run.lock"
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml, which is ten times as fast, where PyYAML was built with it."""
CONFIG, REPORT, NODE_CONFIG = "config.yaml", "report.json", "rollout_node.yaml"


@dataclass(frozen=True)
class ListedCollection:
    """The facts of a collection in its meta file.

    ``wanted`` counts the requested rollouts; ``ended``: no more will come; ``failures`` are the failed attempts, {task:
    {reason: count}}; ``began`` is the time of its first opening, 0 where the file lacks it; ``damage`` names the lines
    that cannot be read.
    """

    wanted: int
    ended: bool
    failures: dict[str, dict[str, int]]
    damage: Sequence[str] = ()
    began: float = 0.0

    @classmethod
    def of(cls, log: Path) -> ListedCollection:
        """Read the meta file beside ``log``; without this file, the collection counts as ended without failures."""
        meta = meta_path(log.parent, log.stem)
        failures: dict[str, dict[str, int]] = {}
        damage: list[str] = []
        wanted, ended, began = 0, not meta.is_file(), 0.0
        for _, record in () if ended else sound_lines(meta, "fact of a collection", json_object, damage):
            match record:
                case {"request": {"tasks": list(tasks), "rollouts_per_task": int(each), **further}}:
                    branches = further.get("branches")
                    wanted = each * len(branches if isinstance(branches, list) and branches else tasks)
                case {"failure": {"task_id": str(task), "reason": str(reason)}}:
                    counts = failures.setdefault(task, {})
                    counts[reason] = counts.get(reason, 0) + 1
                case {"opened": _, "at": int() | float() as at}:
                    began = began or at
                case {"end": _}:
                    ended = True
        return cls(wanted, ended, failures, tuple(damage), began)


def run_head(
    folder: Path, collections: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return {"model", "algorithm", "dataset", "state", "runs", "seconds_left"} of a training run or an evaluation.

    Args:
        folder: the run's folder; facts missing there are "" or None.
        collections: as :meth:`RunData.overview` lists them.
        lines: the lines of metrics.jsonl.

    ``runs`` says whether a process works on the folder now, or scores its policy. ``seconds_left`` is a number only
    during training: the seconds of the last iteration times the number of iterations left.
    """
    config = read_yaml(folder / CONFIG)
    trains, scores = is_locked(folder, RUN_LOCK), _scores(folder)
    model = _text_of(config, "model", "path") or _text_of(read_yaml(folder / NODE_CONFIG), "model", "path")
    parts = [_text_of(config, name, "_component_").rpartition(".")[2] for name in ("advantage", "loss")]
    last, total = lines[-1] if lines else {}, config.get("max_iterations")
    left = None
    if trains and isinstance(total, int) and isinstance(last.get("seconds"), int | float):
        left = last["seconds"] * max(0, total - last["iteration"])
    return {
        "model": Path(model).name,
        "algorithm": ", ".join(filter(None, parts)),
        "dataset": str(last.get("dataset", "")),
        "state": _state(trains, scores, (folder / REPORT).is_file(), total, last.get("iteration", 0), collections),
        "runs": trains or scores,
        "seconds_left": left,
    }


def is_at_work(folder: Path) -> bool:
    """Return whether a process trains in the folder, or evaluates in it or in a folder within it."""
    return is_locked(folder, RUN_LOCK) or _scores(folder)


def _scores(run: Path) -> bool:
    """Return whether a process evaluates the run's policy in a folder within the run's."""
    return any(is_locked(lock.parent, RUN_LOCK) for lock in run.glob(f"*/{RUN_LOCK}"))


def _state(
    trains: bool, scores: bool, reported: bool, total: object, done: int, collections: Sequence[Mapping[str, Any]]
) -> str:
    """Return the run's state in a few words."""
    of = f" of {total}" if isinstance(total, int) else ""
    if not trains and not scores:
        if reported or (done and done == total):
            left = [item["name"] for item in collections if item["kind"] == "evaluation" and not item["ended"]]
            return f"scoring stopped: {left[-1]}" if left and not reported else "ended"
        return f"stopped after iteration {done}{of}" if done else "not running"
    # A collection that a run left behind when it went back to a checkpoint is of an iteration that is done.
    at_work = {"evaluation": scores or not of, "continuation": False}
    mine = [item for item in collections if at_work.get(item["kind"], trains)]
    coming = [item for item in mine if item["kind"] != "training" or item["iteration"] > done]
    open_ = [item for item in coming if not item["ended"]]
    if open_:
        item = open_[-1]
        doing = f"{item['name']}: {'scoring' if item['kind'] == 'evaluation' else 'collecting'}"
        if item["totals"] is None and item["bytes"]:  # too large to be read for a number
            return doing
        return f"{doing} {item['totals']['rollouts'] if item['totals'] else 0}/{item['wanted']}"
    if not trains:
        return "scoring"
    if any(item["kind"] == "training" for item in coming):
        return f"iteration {done + 1}{of}: updating"
    return f"iteration {done + 1}{of}: begins" if isinstance(total, int) else "at work"


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a file as data; {} for a missing or damaged one."""
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _SafeLoader) if file.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def _text_of(config: Mapping[str, Any], name: str, key: str) -> str:
    section = config.get(name)
    return str(section.get(key) or "") if isinstance(section, dict) else ""
