"""A task of ColBench: the human's request, the code that he has in mind, and what the request leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        guess: code that follows the description and guesses the particulars; only generated tasks have it.
    """

    task_id: str
    description: str
    reference: str
    calls: tuple[str, ...]
    particulars: tuple[Particular, ...] = ()
    guess: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return an object with the keys of the benchmark's files, and ours."""
        return {
            "problem_description": self.description,
            "ground_truth": self.reference,
            "test_cases": {f"test{number}": call for number, call in enumerate(self.calls, start=1)},
            "particulars": [asdict(particular) for particular in self.particulars],
            "guess": self.guess,
        }

    @classmethod
    def from_json(cls, task_id: str, data: Mapping[str, Any]) -> ColBenchTask:
        """Read a line's object; raises KeyError, TypeError or ValueError where it is not a task."""
        tests = data["test_cases"]
        calls = tuple(tests.values() if isinstance(tests, Mapping) else tests)
        texts = (data["problem_description"], data["ground_truth"], data.get("guess", ""), *calls)
        if not calls or not all(isinstance(text, str) for text in texts):
            raise ValueError("descriptions, code and calls must be text, and there must be a call")
        particulars = tuple(Particular(item["topic"], item["answer"]) for item in data.get("particulars", ()))
        return cls(task_id, texts[0], texts[1], calls, particulars, texts[2])
