"""Tasks of our own: small functions with three to five particulars that the description leaves open.

A task is kept only if running it shows two things: whichever particular is replaced by another choice, a call gives
another result; and the code that follows the description and guesses the rest, does not pass.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from loop_contrib.colbench.task import ColBenchTask, Particular

CALLS = 10
TRIES = 30
"""Draws of calls for a task before it is given up."""

PER_FAMILY = {"train": 80, "dev": 8, "test": 16}
"""Split -> tasks of each family."""

NOUNS = ("orders", "trips", "players", "rooms")
FIELDS = ("amount", "price", "size", "score", "time", "weight", "points", "value")

CHOICES: Mapping[str, Mapping[str, str]] = {
    "field": {name: f"The field is called {name}." for name in FIELDS},
    "limit": {limit: f"The limit is {limit}." for limit in ("10", "20", "30", "40", "50")},
    "boundary": {">=": "Exactly the limit counts too.", ">": "Exactly the limit does not count."},
    "default": {value: f"A missing value counts as {value}." for value in ("0", "100")},
    "rounding": {
        "2": "Round to two decimals.",
        "1": "Round to one decimal.",
        "0": "Round to zero decimals.",
    },
    "unit": {
        "1": "Mine are hours, I want hours.",
        "60": "Mine are hours, I want minutes.",
        "3600": "Mine are hours, I want seconds.",
    },
    "tie": {"0": "In a tie the first one wins.", "-1": "In a tie the last one wins."},
}
"""Topic -> what stands in the code -> what the human says. The first choice is what one would guess."""


@dataclass(frozen=True)
class TaskFamily:
    """Tasks whose code has one template. ``request`` and ``code`` contain ``{noun}`` and topics in braces."""

    name: str
    request: str
    code: str
    topics: tuple[str, ...]

    def render(self, noun: str, chosen: Mapping[str, str]) -> str:
        """Return the family's code with this noun and the chosen value of each topic."""
        return self.code.format(noun=noun, **chosen)


FAMILIES = (
    TaskFamily(
        "count",
        "count my large {noun}",
        'def count_{noun}(rows):\n    return sum(row.get("{field}", {default}) {boundary} {limit} for row in rows)',
        ("field", "limit", "boundary", "default"),
    ),
    TaskFamily(
        "total",
        "add up my large {noun}",
        'def total_{noun}(rows):\n    large = [row["{field}"] for row in rows if row["{field}"] {boundary} {limit}]\n'
        "    return round(sum(large), {rounding})",
        ("field", "limit", "boundary", "rounding"),
    ),
    TaskFamily(
        "best",
        "name the best of my {noun}",
        'def best_{noun}(rows):\n    values = [row.get("{field}", {default}) for row in rows]\n'
        '    best = [row["name"] for row, value in zip(rows, values) if value == max(values)]\n'
        "    return best[{tie}]",
        ("field", "default", "tie"),
    ),
    TaskFamily(
        "mean",
        "average my {noun}",
        'def mean_{noun}(rows):\n    values = [row.get("{field}", {default}) for row in rows]\n'
        "    return round(sum(values) / len(values) * {unit}, {rounding})",
        ("field", "default", "unit", "rounding"),
    ),
    TaskFamily(
        "bill",
        "bill the time of my large {noun}",
        'def bill_{noun}(rows):\n    large = [row["{field}"] for row in rows if row["{field}"] {boundary} {limit}]\n'
        "    return round(sum(large) * {unit}, {rounding})",
        ("field", "limit", "boundary", "unit", "rounding"),
    ),
)
_FAMILY = {family.name: family for family in FAMILIES}


def value_of(particular: Particular) -> str:
    """Return the value that the code contains if the human gives this answer."""
    return next(value for value, answer in CHOICES[particular.topic].items() if answer == particular.answer)


def guess_of(topic: str) -> str:
    """Return the value of a topic that an agent would guess without asking."""
    return next(iter(CHOICES[topic]))


def code_knowing(task: ColBenchTask, known: Collection[Particular]) -> str:
    """Return a generated task's code with the true values of the particulars ``known`` and guesses of all others."""
    name = task.reference.removeprefix("def ").partition("(")[0]
    family, _, noun = name.partition("_")
    chosen = {
        particular.topic: value_of(particular) if particular in known else guess_of(particular.topic)
        for particular in task.particulars
    }
    return _FAMILY[family].render(noun, chosen)


@cache
def generate(seed: int) -> Mapping[str, Sequence[ColBenchTask]]:
    """Return split -> tasks, sorted by id. The same seed gives the same tasks; no two tasks have the same code.

    Raises:
        ValueError: a family has too few tasks whose tests fail every wrong code.
    """
    splits: dict[str, list[ColBenchTask]] = {split: [] for split in PER_FAMILY}
    for family in FAMILIES:
        candidates = _candidates(family, random.Random(f"colbench {seed} {family.name}"))
        for split, count in PER_FAMILY.items():
            drawn = list(itertools.islice(candidates, count))
            if len(drawn) < count:
                raise ValueError(f"the family {family.name} has {len(drawn)} of {count} tasks for {split}")
            for number, (description, reference, calls, particulars) in enumerate(drawn):
                task_id = f"{split}_{family.name}{number:03}_1"
                splits[split].append(ColBenchTask(task_id, description, reference, calls, particulars))
    return {split: tuple(sorted(tasks, key=lambda task: task.task_id)) for split, tasks in splits.items()}


_Rows = list[dict[str, object]]
_Draft = tuple[str, str, tuple[str, ...], tuple[Particular, ...]]
"""Description, reference, calls, particulars."""


def _candidates(family: TaskFamily, rng: random.Random) -> Iterator[_Draft]:
    """Yield, in random order, the tasks of a family whose tests fail every code with a wrong particular."""
    guessed = {topic: guess_of(topic) for topic in family.topics}
    combinations = list(itertools.product(NOUNS, *(CHOICES[topic] for topic in family.topics)))
    for noun, *values in rng.sample(combinations, len(combinations)):
        chosen = dict(zip(family.topics, values, strict=True))
        reference = family.render(noun, chosen)
        others = [
            family.render(noun, {**chosen, topic: other})
            for topic in family.topics
            for other in CHOICES[topic]
            if other != chosen[topic]
        ]
        guess = family.render(noun, guessed)
        name = f"{family.name}_{noun}"
        wanted, *rivals = (_function(code, name) for code in (reference, *others, guess))
        other_field = rng.choice([name for name in FIELDS if name != chosen["field"]])
        for _ in range(TRIES):
            tables = [_rows(family, chosen["field"], other_field, rng) for _ in range(CALLS)]
            expected = [wanted(rows) for rows in tables]
            if not any(_passes(rival, tables, expected) for rival in rivals):
                description = f"Please write a function {name}(rows). It should {family.request.format(noun=noun)}."
                particulars = tuple(Particular(topic, CHOICES[topic][value]) for topic, value in chosen.items())
                yield description, reference, tuple(f"{name}({rows})" for rows in tables), particulars
                break


def _rows(family: TaskFamily, field: str, other_field: str, rng: random.Random) -> _Rows:
    """Draw the argument of a call: values below, at and above every limit; some have decimals, some are missing.

    Rows have a second field of the same kind, so an agent's code cannot see from its argument which field is meant.
    """

    def value() -> float:
        number = rng.choice((5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55))
        return number + rng.choice((0, 0, 0.125, 0.376)) if "rounding" in family.topics else number

    rows: _Rows = []
    for name in "abcd":
        row: dict[str, object] = {"name": name} if family.name == "best" else {}
        for key in sorted((field, other_field)):
            if "default" not in family.topics or rng.random() < 0.75:
                row[key] = value()
        rows.append(row)
    return rows


def _function(code: str, name: str) -> Callable[[_Rows], object]:
    """Run a generated task's code and return its function ``name``."""
    names: dict[str, Any] = {}
    exec(code, names)
    function: Callable[[_Rows], object] = names[name]
    return function


def _passes(function: Callable[[_Rows], object], tables: Sequence[_Rows], expected: Sequence[object]) -> bool:
    try:
        return all(function(rows) == value for rows, value in zip(tables, expected, strict=True))
    except KeyError:  # of another field's name
        return False
