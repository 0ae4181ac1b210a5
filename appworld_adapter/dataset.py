"""Tasks and splits of a dataset in AppWorld's on-disk layout.

Pure functions on the folder that holds ``data/`` (APPWORLD_ROOT); nothing here imports the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agent_environments.protocol import UnknownTask
from appworld_adapter.making import dataset_commands

SPLITS = ("train", "dev", "test_normal", "test_challenge")

# fmt: off
PAPER_TRAIN_SCENARIOS = (
    "07b42fd", "229360a", "27e1026", "287e338", "692c77d", "82e2fac", "aa8502b", "b7a9ee9",
    "c901732", "ccb4494", "ce359b5", "e7a10f8", "e85d92a", "e3d6c94", "d0b1f43", "2a163ab",
    "60d0b5b", "6ea6792", "29caf6f", "cf6abd2", "771d8fc", "7d7fbf6", "76f2c72", "302c169",
)
# fmt: on
"""The 24 scenarios (72 tasks, difficulty 1 and 2) of AppWorld's train split that the LOOP paper trains on."""

LONGEST_NAME = 255
"""Bytes of a file's name; for a longer one the file system raises an error."""

UNNAMED_DATASET = "unknown (no dataset.json)"

PAPER_TRAIN_SPLIT = "paper_train"
"""The split by which :func:`load_split` returns the tasks of :data:`PAPER_TRAIN_SCENARIOS` that a dataset holds."""


def scenario_of(task_id: str) -> str:
    """Return ``<scenario>`` of an id ``<scenario>_<n>``. A task with any other id, as in other environments, is its own
    scenario."""
    scenario, _, number = task_id.rpartition("_")
    return scenario if scenario and number.isdecimal() else task_id


def dataset_name(root: str | Path) -> str:
    """Return the dataset's name, printed with every score: the name in ``dataset.json`` beside ``data/``.

    AppWorld's own data has no such file. A dataset without the file is called "appworld" if it holds AppWorld's
    training scenarios, else :data:`UNNAMED_DATASET`.

    Raises:
        FileNotFoundError: ``root`` holds no dataset.
        ValueError: a ``dataset.json`` without a name.
    """
    tasks = _data_folder(root) / "tasks"
    marker = Path(root) / "dataset.json"
    if marker.exists():
        try:
            return str(json.loads(marker.read_text(encoding="utf-8"))["name"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{marker} must be {{"name": "..."}}: {error!r}') from error
    real = all((tasks / f"{scenario}_1").is_dir() for scenario in PAPER_TRAIN_SCENARIOS)
    return "appworld" if real else UNNAMED_DATASET


def load_split(root: str | Path, split: str | Sequence[str]) -> list[str]:
    """Return the task ids of a split, in the dataset's order.

    Args:
        root: folder that holds ``data/``.
        split: name of a file in ``data/datasets``, or :data:`PAPER_TRAIN_SPLIT`; a colon and difficulties may follow
            (``train:1,2`` keeps only these). Or a list of task ids, which is checked.

    Raises:
        FileNotFoundError: ``root`` holds no dataset.
        UnknownTask: the split, difficulty or task does not exist, or the split has no tasks.
    """
    data = _data_folder(root)
    if not isinstance(split, str):
        check_tasks(root, split)
        return list(split)
    name, colon, levels = split.partition(":")
    if colon:
        wanted = levels.split(",")
        if not set(wanted) <= {"1", "2", "3"}:
            raise UnknownTask(f"split {split!r} must end in difficulties 1 to 3, such as {name}:1,2")
        try:
            tasks = [task for task in load_split(root, name) if str(difficulty_of(root, task)) in wanted]
        except (OSError, KeyError) as error:  # the real test splits may come without it
            raise UnknownTask(f"split {split!r}: dataset {dataset_name(root)} lacks difficulties: {error}") from error
        if not tasks:
            raise UnknownTask(f"split {split!r} of dataset {dataset_name(root)} holds no tasks")
        return tasks
    if split == PAPER_TRAIN_SPLIT:
        tasks = [task for task in load_split(root, "train") if scenario_of(task) in PAPER_TRAIN_SCENARIOS]
        if not tasks:
            raise UnknownTask(f"dataset {dataset_name(root)} holds none of the paper's training scenarios")
    else:
        listing = data / "datasets" / f"{split}.txt"
        # Compared with the names: a path, a NUL or thousands of letters never reach the file system.
        names = sorted(path.stem for path in (data / "datasets").glob("*.txt"))
        if split not in names:
            raise UnknownTask(f"no split {split!r} in dataset {dataset_name(root)}; there are {', '.join(names)}")
        lines = (line.partition(":")[0].strip() for line in listing.read_text(encoding="utf-8").splitlines())
        tasks = [line for line in lines if line]
        if not tasks:
            raise UnknownTask(f"split {split!r} of dataset {dataset_name(root)} holds no tasks: {listing} is empty")
    return tasks


def difficulty_of(root: str | Path, task_id: str) -> int:
    """Return the difficulty (1, 2 or 3) from the task's metadata, which is part of its ground truth."""
    check_tasks(root, [task_id])
    metadata = _data_folder(root) / "tasks" / task_id / "ground_truth" / "metadata.json"
    return int(json.loads(metadata.read_text(encoding="utf-8"))["difficulty"])


def check_tasks(root: str | Path, task_ids: Sequence[str]) -> None:
    """Raise UnknownTask for the first id that the dataset does not hold."""
    folder = _data_folder(root) / "tasks"
    for task_id in task_ids:
        is_name = Path(task_id).name == task_id and len(task_id.encode(errors="replace")) <= LONGEST_NAME
        if not (is_name and (folder / task_id / "specs.json").is_file()):
            raise UnknownTask(f"no task {task_id!r} in dataset {dataset_name(root)} at {root}")


def _data_folder(root: str | Path) -> Path:
    data = Path(root) / "data"
    if not (data / "datasets").is_dir() or not (data / "tasks").is_dir():
        raise FileNotFoundError(
            f"no AppWorld dataset at {root}: expected data/datasets and data/tasks there ({dataset_commands(root)})"
        )
    return data
