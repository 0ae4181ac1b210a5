"""A task of ColBench: the human's request, the code that the human has in mind, and the details left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Particular:
    """A detail that the task's description leaves open. The human says ``answer`` if a question is about ``topic``."""

    topic: str
    answer: str


@dataclass(frozen=True)
class ColBenchTask:
    """A task: the human wants a function.

    Attributes:
        description: the human's vague request, the first message of an episode.
        reference: code of the function that the human has in mind.
        calls: expressions, one for each test. An answer passes if it gives the same value as the reference.
        particulars: details that the description leaves open; only generated tasks list them.
    """

    task_id: str
    description: str
    reference: str
    calls: tuple[str, ...]
    particulars: tuple[Particular, ...] = ()

    @classmethod
    def from_json(cls, task_id: str, data: Mapping[str, Any]) -> ColBenchTask:
        """Read a task from the JSON object of a line. Raises KeyError, TypeError or ValueError if it is not a task."""
        tests = data["test_cases"]
        calls = tuple(tests.values() if isinstance(tests, Mapping) else tests)
        texts = (data["problem_description"], data["ground_truth"], *calls)
        if not calls or not all(isinstance(text, str) for text in texts):
            raise ValueError("descriptions, code and calls must be text, and there must be a call")
        return cls(task_id, texts[0], texts[1], calls)
