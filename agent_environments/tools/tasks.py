"""Tasks of a tool environment: plain mappings, from a list in the user's module or from JSONL files.

Each task is a group of its own, unless its field ``group`` says otherwise.
"""

from __future__ import annotations

import hashlib
import numbers
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_environments.protocol import UnknownTask, tasks_of_split
from loop_plumbing.breakage import raised_as
from loop_plumbing.json_lines import json_lines

Task = dict[str, Any]
SPLIT = "train"
"""The split of tasks that come without one."""
ALONE = "task"
"""The beginning of their ids; that of the split would claim that held out tasks are trained on."""
HELD_OUT = "held_out"
"""The split of tasks that are set aside from tasks without a split."""


class TaskTable:
    """The tasks of each split, in order.

    Args:
        splits: split -> tasks. An id that is a whole number or a UUID becomes text.
        named: tasks without an id get ``named`` and a number as their id; by default the split's name and a number.

    Raises:
        ValueError: there are no tasks, a task is not a mapping, an id or group is bad, or two tasks have the same id.
    """

    def __init__(self, splits: Mapping[str, Iterable[Mapping[str, Any]]], named: str | None = None) -> None:
        self._splits: dict[str, list[str]] = {}
        self._tasks: dict[str, Task] = {}
        self.groups: dict[str, str] = {}
        """The groups of the tasks that state one, by task id."""
        for split, tasks in splits.items():
            self._splits[split] = [self._add(task, f"{named or split}{number}") for number, task in enumerate(tasks, 1)]
        if not self._tasks:
            raise ValueError("there are no tasks")

    def _add(self, task: Mapping[str, Any], default_id: str) -> str:
        if not isinstance(task, Mapping):
            raise ValueError(f"task {default_id} must be a mapping, not {task!r}")
        stated = task.get("id", default_id)
        task_id = _name(stated)
        if not task_id:
            raise ValueError(f"task id {stated!r} must be text, or a whole number")
        if task_id in self._tasks:
            raise ValueError(f"there are two tasks {task_id!r}")
        self._tasks[task_id] = {**task, "id": stated}
        if (group := task.get("group")) is not None:
            if not (name := _name(group)):
                raise ValueError(
                    f"task {task_id}: its field 'group' names the group of tasks that it belongs to, by a text or a "
                    f"whole number; it is {group!r}: call the field otherwise"
                )
            self.groups[task_id] = name
        return task_id

    def group_of(self, task_id: str) -> str:
        """Return the group of a task; the task's own id if the task states no group."""
        return self.groups.get(task_id, task_id)

    @property
    def splits(self) -> list[str]:
        """The names of the splits, in order."""
        return list(self._splits)

    def hold_out(self, groups: int) -> None:
        """Move the given number of groups of tasks to the split :data:`HELD_OUT`; the same tasks give the same split.

        Raises:
            ValueError: there is a split other than :data:`SPLIT`, or :data:`SPLIT` would lose all its groups.
        """
        if self.splits != [SPLIT]:
            raise ValueError(f"held_out is for tasks without splits; there are {', '.join(self.splits)}")
        names = set(map(self.group_of, self._tasks))
        if not isinstance(groups, int) or not 0 < groups < len(names):
            raise ValueError(f"held_out is {groups}; of {len(names)} groups of tasks it can be 1 to {len(names) - 1}")
        held_out = set(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:groups])
        for split, inside in ((SPLIT, False), (HELD_OUT, True)):
            self._splits[split] = [task_id for task_id in self._tasks if (self.group_of(task_id) in held_out) == inside]

    def split(self, name: str) -> list[str]:
        """Return a split's task ids; raises UnknownTask if the split is unknown or empty."""
        return tasks_of_split(self._splits, name)

    def __getitem__(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise UnknownTask(f"no task {task_id!r}")
        return self._tasks[task_id]

    def all(self) -> list[Task]:
        return list(self._tasks.values())


def read_tasks(source: object) -> TaskTable:
    """Read tasks from a config's or a module's value: a list of mappings, the path of a JSONL file, or either by split.

    Raises:
        ValueError: the file is missing, a line is not a JSON object, or :class:`TaskTable` refuses the tasks.
    """
    if source is None:
        raise ValueError("there are no TASKS: write a list of mappings, each with its question")
    if isinstance(source, str | os.PathLike):
        source = _read_file(Path(source))
    if isinstance(source, list | tuple):
        return TaskTable({SPLIT: source}, ALONE)
    if not isinstance(source, Mapping):
        raise ValueError(f"tasks must be a list, a path, or either of them for each split, not {source!r:.80}")
    by_split: dict[str, Iterable[Mapping[str, Any]]] = {}
    for split, tasks in source.items():
        if isinstance(tasks, str | os.PathLike) and os.path.isfile(tasks):
            tasks = _read_file(Path(tasks))
        elif isinstance(tasks, str | bytes | Mapping | os.PathLike) or not isinstance(tasks, Iterable):
            missing = ", which is not a file" if isinstance(tasks, str | os.PathLike) else ""
            raise ValueError(
                "TASKS is a mapping, so each value is a list, or the path of a JSONL file, with the tasks of a split; "
                f"that of {split!r} is {tasks!r:.80}{missing}; for one task write TASKS = [{{...}}]"
            )
        by_split[str(split)] = tasks
    return TaskTable(by_split)


def _read_file(file: Path) -> list[Task]:
    with raised_as(ValueError, f"tasks cannot be read: {file}: ", OSError):
        return [task for _, task in json_lines(file)]


def _name(value: object) -> str:
    """Return an id or a group's name as text; "" for a value that can be neither."""
    if isinstance(value, str):
        return value
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return str(value) if whole or isinstance(value, uuid.UUID) else ""
