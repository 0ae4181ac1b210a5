import datetime
import enum
import random
from dataclasses import dataclass, field

import numpy


class Order(enum.Enum):
    UP = "ascending"
    DOWN = "descending"


@dataclass
class Part:
    name: str
    weight: float = 1.0


@dataclass
class SumsConfig:
    size: int = 500
    seed: int | None = None
    step: int = 1
    order: Order = Order.UP
    since: datetime.date | None = None
    parts: list[Part] = field(default_factory=list)
    orders: list[Order] | None = None


class Sums:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, number):
        left = self.config.seed + self.config.step * number
        return {"question": f"What is {left} + 1?", "answer": str(left + 1), "metadata": {"left": left}}

    def score_answer(self, answer, entry):
        if answer == "raise":
            raise KeyError("answer")
        if answer is not None and answer.startswith("eval "):  # as a dozen of the package's datasets do
            return float(eval(answer.removeprefix("eval ")))
        return 1.0 if answer == entry["answer"] else 0.0 if answer is None else 0.01


class Drawn(Sums):
    """Draws from generators that its seed does not reach, as list_functions, codeio and knight_swap do."""

    def __getitem__(self, number):
        left = f"{random.random()} {numpy.random.rand()}"
        return {"question": left, "answer": left}


class Shown(Sums):
    """Says what its config is."""

    def __getitem__(self, number):
        given = self.config
        return {"question": repr((given.order, given.since, given.parts, given.orders)), "answer": "1"}


class Generous(Sums):
    """Pays any word, as game_of_life_halting does."""

    def score_answer(self, answer, entry):
        return 1.0 if answer else 0.0


class Unanswered(Sums):
    """Has no right answer, as rush_hour; what is said raises."""

    def __getitem__(self, number):
        return super().__getitem__(number) | {"answer": None}

    def score_answer(self, answer, entry):
        return len(answer) / int(answer)


class Boxes(Unanswered):
    """Has no right answer, as boxnet; some of what is said raises, and some has no number as its score."""

    def score_answer(self, answer, entry):
        return {None: 0.0, "0": 0.05, "inf": float("inf"), "nan": float("nan")}[answer]


DATASETS = {kind.__name__.lower(): (kind, SumsConfig) for kind in (Sums, Drawn, Shown, Generous, Unanswered, Boxes)}


def create_dataset(name, **options):
    kind, config = DATASETS[name]
    return kind(config(**options))
