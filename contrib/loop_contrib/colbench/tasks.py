"""Tasks of ColBench: read from the benchmark's own files, or generated, and what of them only a critic may see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_environments.protocol import UnknownTask
from agent_environments.tools.tasks import json_lines


@dataclass(frozen=True)
class Particular:
    """Something that the description leaves open. ``answer`` is what the human says when asked about ``topic``."""

    topic: str
    answer: str


@dataclass(frozen=True)
class ColBenchTask:
    """A function that a human wants.

    Attributes:
        description: the human's vague request, the first message of an episode.
        reference: the function he has in mind, as code.
        calls: expressions; an answer passes the test of one if it gives what the reference gives.
        particulars: what the description leaves open; only generated tasks say so.
        guess: code that follows the description and guesses the particulars; only generated tasks have it.
    """

    task_id: str
    description: str
    reference: str
    calls: tuple[str, ...]
    particulars: tuple[Particular, ...] = ()
    guess: str = ""

    def to_json(self) -> dict[str, Any]:
        """An object with the keys of the benchmark's files, and ours."""
        return {
            "problem_description": self.description,
            "ground_truth": self.reference,
            "test_cases": {f"test{number}": call for number, call in enumerate(self.calls, start=1)},
            "particulars": [asdict(particular) for particular in self.particulars],
            "guess": self.guess,
        }

    @classmethod
    def from_json(cls, task_id: str, data: Mapping[str, Any]) -> ColBenchTask:
        """Of a line's object; raises KeyError, TypeError or ValueError where it is no task."""
        tests = data["test_cases"]
        calls = tuple(tests.values() if isinstance(tests, Mapping) else tests)
        texts = (data["problem_description"], data["ground_truth"], data.get("guess", ""), *calls)
        if not calls or not all(isinstance(text, str) for text in texts):
            raise ValueError("descriptions, code and calls must be text, and there must be a call")
        particulars = tuple(Particular(item["topic"], item["answer"]) for item in data.get("particulars", ()))
        return cls(task_id, texts[0], texts[1], calls, particulars, texts[2])


def read_tasks(path: Path, split: str) -> list[ColBenchTask]:
    """The tasks of a JSONL file, in its order; the n-th is named ``<split><n>_1``.

    Raises:
        ValueError: there is no such file, or a line is no task; says which.
    """
    tasks: list[ColBenchTask] = []
    try:
        for number, data in json_lines(path):
            try:
                tasks.append(ColBenchTask.from_json(f"{split}{len(tasks) + 1:05}_1", data))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number} is no task of ColBench's backend programming "
                    f"(problem_description, ground_truth, test_cases): {error!r}"
                ) from error
    except OSError as error:
        raise ValueError(f"cannot read the tasks of split {split!r}: {error}") from error
    if not tasks:
        raise ValueError(f"{path} holds no tasks")
    return tasks


class ColBenchTasks(Mapping[str, ColBenchTask]):
    """The tasks of a pool, by id. As a config's ``samples.information`` it tells a critic the human's code.

    Args:
        files: a JSONL file for each split; null generates tasks.
        seed: of the generated tasks.

    Raises:
        ValueError: a file is missing or wrong.
    """

    def __init__(self, files: Mapping[str, str] | None = None, seed: int = 0) -> None:
        self.splits: Mapping[str, Sequence[ColBenchTask]]
        if files:
            self.splits = {split: read_tasks(Path(path), split) for split, path in files.items()}
        else:
            from loop_contrib.colbench.generator import generate

            self.splits = generate(seed)
        self._by_id = {task.task_id: task for tasks in self.splits.values() for task in tasks}

    def __getitem__(self, task_id: str) -> ColBenchTask:
        """Raises UnknownTask."""
        try:
            return self._by_id[task_id]
        except KeyError:
            raise UnknownTask(f"no task {task_id!r} in ColBench's splits {', '.join(self.splits)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def split(self, name: str) -> Sequence[str]:
        """Task ids of a split, in order; raises UnknownTask."""
        if name not in self.splits:
            raise UnknownTask(f"no split {name!r} in ColBench; there are {', '.join(self.splits)}")
        return [task.task_id for task in self.splits[name]]

    def hidden_information(self, task_id: str) -> str:
        """The code that the human has in mind; raises UnknownTask."""
        return self[task_id].reference
