"""Tasks of ColBench: read from the benchmark's own files, or generated; and their part that only a critic may see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent_environments.protocol import UnknownTask
from loop_contrib.colbench.generator import generate
from loop_contrib.colbench.task import ColBenchTask
from loop_plumbing.breakage import raised_as
from loop_plumbing.json_lines import json_lines


def read_tasks(path: Path, split: str) -> list[ColBenchTask]:
    """Read the tasks of a JSONL file, in the order of its lines. The n-th task gets the id ``<split><n>_1``.

    Raises:
        ValueError: the file does not exist, or a line is not a task; the message names the file or the line.
    """
    tasks: list[ColBenchTask] = []
    with raised_as(ValueError, f"cannot read the tasks of split {split!r}: ", OSError):
        for number, data in json_lines(path):
            try:
                tasks.append(ColBenchTask.from_json(f"{split}{len(tasks) + 1:05}_1", data))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number} is not a task of ColBench's backend programming "
                    f"(problem_description, ground_truth, test_cases): {error!r}"
                ) from error
    if not tasks:
        raise ValueError(f"{path} holds no tasks")
    return tasks


class ColBenchTasks(Mapping[str, ColBenchTask]):
    """Maps a pool's task ids to tasks. As a config's ``samples.information``, it shows a critic the human's code.

    Args:
        files: a JSONL file for each split; null generates tasks.
        seed: seed of the generated tasks.

    Raises:
        ValueError: a file is missing or wrong.
    """

    def __init__(self, files: Mapping[str, str] | None = None, seed: int = 0) -> None:
        self.splits: Mapping[str, Sequence[ColBenchTask]]
        if files:
            self.splits = {split: read_tasks(Path(path), split) for split, path in files.items()}
        else:
            self.splits = generate(seed)
        self._by_id = {task.task_id: task for tasks in self.splits.values() for task in tasks}

    def __getitem__(self, task_id: str) -> ColBenchTask:
        """Return a task. Raises UnknownTask."""
        try:
            return self._by_id[task_id]
        except KeyError:
            raise UnknownTask(f"no task {task_id!r} in ColBench's splits {', '.join(self.splits)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def split(self, name: str) -> Sequence[str]:
        """Return the task ids of a split, in order. Raises UnknownTask."""
        if name not in self.splits:
            raise UnknownTask(f"no split {name!r} in ColBench; there are {', '.join(self.splits)}")
        return [task.task_id for task in self.splits[name]]

    def hidden_information(self, task_id: str) -> str:
        """Return the code that the human has in mind; raises UnknownTask."""
        return self[task_id].reference
