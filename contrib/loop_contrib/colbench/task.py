"""A task of ColBench: the human's request, the code that he has in mind, and what the request leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    """

    task_id: str
    description: str
    reference: str
    calls: tuple[str, ...]
    particulars: tuple[Particular, ...] = ()

    @classmethod
    def from_json(cls, task_id: str, data: Mapping[str, Any]) -> ColBenchTask:
        """Read a line's object; raises KeyError, TypeError or ValueError where it is not a task."""
        tests = data["test_cases"]
        calls = tuple(tests.values() if isinstance(tests, Mapping) else tests)
        texts = (data["problem_description"], data["ground_truth"], *calls)
        if not calls or not all(isinstance(text, str) for text in texts):
            raise ValueError("descriptions, code and calls must be text, and there must be a call")
        return cls(task_id, texts[0], texts[1], calls)
