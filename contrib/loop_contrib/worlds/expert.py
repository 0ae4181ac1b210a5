"""Demonstrations of the worlds that have an expert of their own (``contrib/loop_contrib/worlds``)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from agent_environments.protocol import EnvironmentCrashed, UnknownTask, create_pool
from loop_contrib.worlds import world_words
from loop_contrib.worlds.pool import WorldPool
from loop_contrib.worlds.world_words import WORDS, WorldWords
from loop_formats.schema import ConfigError
from loop_plumbing.separate_task import result_of
from loop_recipes.warm_start.demonstration import Demonstration, Script, play
from loop_recipes.warm_start.demonstrator import Demonstrator, draw
from rollout_server.config import EnvironmentConfig

CLAIM = "I have done it."
GIVING_UP = "It does not work, so I give up."
STOPPED_TURNS = 2
"""Turns in which an agent that has stopped says so."""
FLAWS = ("gave_up", "stopped_short", "skipped_step")

Plan = tuple[str, ...]
"""The expert's commands from one on, which is given now."""


def turns_of(commands: Sequence[str]) -> list[Plan | str]:
    return [tuple(commands[number:]) for number in range(len(commands))]


def possible_flaws(turns: Sequence[Plan | str]) -> list[str]:
    """Return the flaws that an expert's turns can show. With a single turn, the only flaw is to leave it out."""
    return list(FLAWS if len(turns) > 1 else FLAWS[:1])


def flawed(turns: Sequence[Plan | str], flaw: str) -> list[Plan | str]:
    """Return the expert's turns with one flaw. Some turns become a sentence without a command; the world reports this.

    - ``gave_up``: the agent gives up before the first command.
    - ``stopped_short``: the agent says that it is done although the last command is missing.
    - ``skipped_step``: the agent leaves out the first command, plays all others, and gives up.
    """
    match flaw:
        case "gave_up":
            return [GIVING_UP] * STOPPED_TURNS
        case "stopped_short":
            return [*turns[:-1], *[CLAIM] * STOPPED_TURNS]
        case "skipped_step":
            return [*turns[1:], *[GIVING_UP] * STOPPED_TURNS]
    raise ValueError(f"no flaw {flaw!r}; there are {', '.join(FLAWS)}")


class ExpertDemonstrator(Demonstrator):
    """Demonstrates the play of a world's own expert. The thoughts come from :mod:`~loop_contrib.worlds.world_words`.

    Raises:
        ConfigError: the environment has no expert, or its config is wrong.
    """

    flaws = FLAWS

    def __init__(self, environment: EnvironmentConfig) -> None:
        self.environment = environment
        self._words = WORDS.get(environment.name, WorldWords())
        self._plans = cache(self._ask)
        pool = self._pool()
        self._worker, self._spoken = pool.kind.worker, pool.message

    def sources(self) -> list[Path]:
        return [self._worker, Path(world_words.__file__), Path(__file__)]

    def _pool(self) -> WorldPool:
        try:
            pool = create_pool(self.environment.name, self.environment.options, lambda text: [])
        except ValueError as error:
            raise ConfigError(f"environment: {error}") from error
        if not isinstance(pool, WorldPool):
            raise ConfigError(f"environment.name: {self.environment.name!r} has no expert to learn from")
        return pool

    def _ask(self, split: str) -> dict[str, list[str]]:
        """Return task id -> the expert's commands, for the tasks of a split that these commands solve."""

        async def ask() -> dict[str, list[str]]:
            pool = self._pool()
            await pool.open()
            plans = {}
            try:
                for task in pool.tasks(split):
                    commands = await pool.expert(task)
                    if (await play(pool, Script(task, None, tuple(map(pool.message, commands))), task)).success:
                        plans[task] = commands
                return plans
            finally:
                await pool.close()

        try:
            return result_of(ask())
        except (EnvironmentCrashed, UnknownTask, FileNotFoundError) as error:
            raise ConfigError(f"no demonstrations of {split}: {error}") from error

    def scripts(
        self, split: str, count: int, seed: int, flawed_share: float = 0.0, habits: Sequence[str] = ()
    ) -> list[Script]:
        rng = random.Random(f"demonstrations {seed}")
        plans = self._plans(split)
        turns = {task: turns_of(commands) for task, commands in plans.items()}
        possible = {task: possible_flaws(turns[task]) for task in plans}
        scripts = []
        for task, flaw in draw(possible, count, rng, flawed_share, habits):
            taken = turns[task] if flaw is None else flawed(turns[task], flaw)
            scripts.append(Script(task, flaw, tuple(taken), self._message))
        return scripts

    def _message(self, task: str, observation: str, turn: Plan | str) -> str:
        if isinstance(turn, str):
            return turn
        return f"{self._words.thought(task, observation, turn)}\n{self._spoken(turn[0])}".lstrip()

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        return self._words.renamed(demonstration, rng)

    def group(self, task_id: str) -> str:
        return self.environment.name
