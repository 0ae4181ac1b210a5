"""The interface between the warm start and an environment: scripts to play, and their rewriting with other names."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from loop_formats.schema import ConfigError
from loop_recipes.warm_start.demonstration import Demonstration, Script
from rollout_server.config import EnvironmentConfig


class Demonstrator(Protocol):
    """Somebody who can play an environment's tasks, well or with a deliberate flaw.

    Attributes:
        environment: plays the scripts.
        flaws: names of the flaws it can make.
    """

    environment: EnvironmentConfig

    @property
    def flaws(self) -> Collection[str]: ...

    def prepare(self) -> None:
        """Prepare the environment; raises ConfigError if that fails. By default there is nothing to do."""

    def sources(self) -> list[Path]:
        """Return the files behind the scripts: when one changes, the demonstrations are made anew."""

    def scripts(
        self, split: str, count: int, seed: int, flawed_share: float = 0.0, habits: Sequence[str] = ()
    ) -> list[Script]:
        """Draw ``count`` scripts of the split's tasks, task after task in a shuffled order.

        With ``habits``, every script has one of these flaws; tasks without room for such a flaw are skipped. Without
        ``habits``, a share of the scripts has a flaw of any kind. The flaw is drawn anew each time; a habit that is
        listed twice is drawn twice as often.

        Raises:
            ConfigError: no task leaves room for a habit.
        """

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        """Rewrite the conversation with other values, so that the model copies values and does not memorise them."""

    def texts(self, demonstration: Demonstration) -> list[str]:
        """Return the texts of a demonstration to train the tokenizer on; by default all of them."""
        spoken = itertools.chain.from_iterable(demonstration.steps)
        return [*(message.content for message in demonstration.opening), *spoken]

    def group(self, task_id: str) -> str:
        """Return the name under which measurements count the task."""


def draw(
    possible: Mapping[str, Sequence[str]],
    count: int,
    rng: random.Random,
    flawed_share: float = 0.0,
    habits: Sequence[str] = (),
) -> Iterator[tuple[str, str | None]]:
    """Draw (task, flaw) for ``count`` scripts by the rules of :meth:`Demonstrator.scripts`.

    Args:
        possible: task -> the flaws that are possible in the task.

    Raises:
        ConfigError: no task leaves room for a habit.
    """
    drawn: list[tuple[str, list[str]]] = []
    for task in rng.sample(list(possible), len(possible)):
        flaws = [flaw for flaw in possible[task] for _ in range(habits.count(flaw) if habits else 1)]
        if flaws or not habits:
            drawn.append((task, flaws))
    if not drawn:
        raise ConfigError(f"demonstrations.habits: none of {len(possible)} tasks leaves room for {', '.join(habits)}")
    for task, flaws in itertools.islice(itertools.cycle(drawn), count):
        yield task, rng.choice(flaws) if flaws and (habits or rng.random() < flawed_share) else None
