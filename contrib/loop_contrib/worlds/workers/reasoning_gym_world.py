"""Questions of the package ``reasoning-gym``: each task is an entry of one of its datasets, answered in one turn.

    python reasoning_gym_world.py MEMORY_MB '{"dataset": "chain_sum", "size": 500, "seed": 0, ...}' SOCKET

The instructions are one of the package's prompts or a user's text. If they mention <answer> tags, the answer is the
text that the package finds in them, else the whole turn. The score is the package's own. An answer whose score raises
gets 0, if the right answer has a score. The dataset draws an entry from its seed and its number; some also draw from
Python's and numpy's own generators, which are seeded before, so the same config has the same tasks in every process.

Some datasets evaluate an answer as an expression of Python. So a process is sealed before it scores one, and ends with
its episode: the answer reaches no file, process or network, and leaves nothing to the next one. But it can still set
its own score, because it is evaluated where the score is computed.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import json
import math
import random
import sys
import typing
import zlib
from pathlib import Path

sys.path.append(
    next(
        str(above / "agent_environments/sandbox")
        for above in Path(__file__).parents
        if (above / "agent_environments").is_dir()
    )
)

import opened_files
import reasoning_gym
import sandbox
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
from worker_loop import Step, WorkerEpisode, serve

try:
    import numpy
except ImportError:  # then no dataset draws from it
    numpy = None

SCORING_MB = 1024
"""Memory that the scoring of an answer may allocate."""
PROBED_TASKS = 10
"""Tasks whose scores are checked before the first episode."""
NONSENSE = ("qwnothing", "0", "nan", "", None)
"""Answers that are right by chance at most; None is a turn without the tags."""


class Question(WorkerEpisode):
    """A question of the dataset. Its answer is scored at once, so that an entry without scores raises its own error."""

    def __init__(self, dataset, entry, tagged: bool, level: str) -> None:
        self._dataset, self._entry, self._tagged, self._level = dataset, entry, tagged, level
        self._score = 0.0
        self.opening = entry["question"]

    def step(self, command: str) -> Step:
        answer = extract_answer(command) if self._tagged else command.strip()
        opened_files.install()
        sandbox.confine({"level": self._level, "memory_mb": SCORING_MB})
        try:
            self._score = score(self._dataset, answer, self._entry)
        except Exception:
            if not has_scores(self._dataset, self._entry):  # no answer can be scored, so it is not this one's fault
                raise
        return Step("", done=True)

    def grade(self) -> tuple[float, bool]:
        return self._score, self._score >= 1.0


def score(dataset, answer: str | None, entry) -> float:
    value = float(dataset.score_answer(answer=answer, entry=entry))
    if not math.isfinite(value):
        raise ValueError(f"the score of {answer!r:.80} is {value}")
    return value


def pays(dataset, answer: str | None, entry, least: float = 1.0) -> bool:
    """Return whether an answer gets a score, and the score is at least ``least``."""
    try:
        return score(dataset, answer, entry) >= least
    except Exception:
        return False


def has_scores(dataset, entry) -> bool:
    """Return whether the right answer scores 1. If the entry has none, return whether any answer gets a score."""
    if entry["answer"] is not None:
        return pays(dataset, entry["answer"], entry)
    return any(pays(dataset, answer, entry, -math.inf) for answer in NONSENSE)


def built(wanted, value):
    """Return the value of a config's field, built from JSON: an enumeration from its value or name, a time from ISO
    format, a config, or a list of such values."""
    for kind in (wanted, *typing.get_args(wanted)):
        if isinstance(kind, type):
            if issubclass(kind, enum.Enum) and isinstance(value, str):
                return kind[value.upper()] if value.upper() in kind.__members__ else kind(value)
            if issubclass(kind, datetime.date | datetime.time) and isinstance(value, str):
                return kind.fromisoformat(value)
            if dataclasses.is_dataclass(kind) and isinstance(value, dict):
                return kind(**options_of(kind, value))
    if isinstance(value, list):
        inner = [kind for form in (wanted, *typing.get_args(wanted)) for kind in typing.get_args(form)]
        return [next((made for kind in inner if (made := built(kind, one)) is not one), one) for one in value]
    return value


def options_of(kind, options: dict) -> dict:
    """Return the given fields of a config of the package, by name. Raises ValueError for an unknown field."""
    fields = [field.name for field in dataclasses.fields(kind)]
    if unknown := options.keys() - set(fields):
        raise ValueError(f"{kind.__name__} has no option {unknown.pop()!r}; there are {', '.join(fields)}")
    types = typing.get_type_hints(kind)
    return {name: built(types[name], value) for name, value in options.items()}


class ReasoningGymWorld:
    def __init__(
        self, dataset: str, size: int, seed: int, options: dict, instructions: str, sandbox_minimum: str
    ) -> None:
        self._level = sandbox.probe()
        if sandbox.LEVELS.index(self._level) < sandbox.LEVELS.index(sandbox_minimum):
            raise PermissionError(
                f"the strongest sandbox that works here is {self._level!r}, below sandbox_minimum {sandbox_minimum!r}: "
                "the kernel, or the container, refuses seccomp filters; or lower sandbox_minimum"
            )
        self.instructions = SYSTEM_PROMPTS.get(instructions, instructions).strip()
        self._tagged = "<answer>" in self.instructions
        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS) or sorted(DATASETS)
            raise ValueError(f"there is no dataset {dataset!r}; there are {', '.join(near)}")
        options = options_of(DATASETS[dataset][1], options)
        self._seed = f"{dataset} {seed}"
        self._draw_from(0)
        self._dataset = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
        self._numbers = {f"{dataset}_{number}": number for number in range(size)}

    def tasks(self) -> dict[str, list[str]]:
        return {"train": list(self._numbers)}

    def _draw_from(self, number: int) -> None:
        """Seed the global random generators, which all datasets use."""
        random.seed(f"{self._seed} {number}")
        if numpy is not None:
            numpy.random.seed(zlib.crc32(f"{self._seed} {number}".encode()))

    def _entry(self, number: int):
        self._draw_from(number)
        return self._dataset[number]

    def notes(self) -> list[str]:
        """Return warnings about the first tasks' scores: right answers that do not score 1, nonsense that does."""
        entries = [self._entry(number) for number in list(self._numbers.values())[:PROBED_TASKS]]
        right = [each for each in entries if each["answer"] is not None and has_scores(self._dataset, each)]
        notes = []
        if len(right) < len(entries):
            notes.append(
                f"{len(entries) - len(right)} of the first {len(entries)} tasks have no right answer that scores 1"
            )
        for answer in NONSENSE:
            paid = sum(pays(self._dataset, answer, entry) for entry in right if entry["answer"] != answer)
            if paid > len(right) / 2:
                notes.append(f"the answer {answer!r} has the full score in {paid} of the first {len(right)} tasks")
        return notes

    def start(self, task: str) -> Question:
        return Question(self._dataset, self._entry(self._numbers[task]), self._tagged, self._level)

    def expert(self, task: str) -> list[str]:
        answer = self._entry(self._numbers[task])["answer"]
        return [f"<answer>{answer}</answer>" if self._tagged else answer]


if __name__ == "__main__":
    serve(lambda: ReasoningGymWorld(**json.loads(sys.argv[2])))
