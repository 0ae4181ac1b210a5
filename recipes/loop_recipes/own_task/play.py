"""Plays episodes of an environment in this process, without a model, to show an agent's view."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.protocol import Environment, EnvironmentPool, EnvironmentTimeout, Grade, Message, acquire

Speak = Callable[[list[Message]], str | None]
"""A function from the messages so far to the agent's next one; None ends the episode."""
GRADED = (
    "agent_environments.guarded_environment",
    "agent_environments.groups",
    "agent_environments.tools.environment",
    "agent_environments.tools.group",
)
"""Modules whose logs repeat the grade, which is printed."""
Agent = Callable[[Environment, list[Message]], Awaitable[str | None]]
"""The same as a coroutine function, which is given the episode's environment too."""


@dataclass(frozen=True)
class Played:
    """An episode that was played: its messages, the turns that the agent took, and its grade."""

    task_id: str
    messages: list[Message]
    turns: int
    grade: Grade


def words_as_tokens(text: str) -> list[tuple[int, int]]:
    """Return the spans of a text's words, for cutting observations without a tokenizer."""
    return [match.span() for match in re.finditer(r"\S+\s*", text)]


def nothing(messages: list[Message]) -> None:
    """Do nothing. This is an agent to which every reward should give 0."""


async def play_tasks(
    pool: EnvironmentPool,
    tasks: Callable[[], Sequence[str]],
    speak: Speak,
    ended: Callable[[Played], None] = lambda played: None,
) -> list[Played]:
    """Open the pool, get the tasks from ``tasks``, and play one episode of each, one after the other. Call ``ended``
    after each episode.

    Raises:
        EnvironmentFault, ValueError, OSError: from the environment; names what failed.
    """

    async def agent(environment: Environment, messages: list[Message]) -> str | None:
        return speak(messages)

    episodes: list[Played] = []
    with quiet(*GRADED):
        try:
            await pool.open()
            for task_id in tasks():
                episodes.append(await play_task(pool, task_id, agent))
                ended(episodes[-1])
        finally:
            await pool.close()
    return episodes


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence the loggers of these names."""
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in before:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


async def play_task(pool: EnvironmentPool, task_id: str, agent: Agent) -> Played:
    """Play one episode of a task in an open pool.

    Raises:
        EnvironmentFault, ValueError, OSError: from the environment; and whatever the agent raises.
    """
    inner = await acquire(pool, task_id, task_id)
    environment = GuardedEnvironment(inner)
    try:
        messages = await environment.start(task_id)
        turns = 0
        while (action := await agent(inner, messages)) is not None:
            turns += 1
            messages.append(Message("assistant", action))
            try:
                result = await environment.step(action)
            except EnvironmentTimeout as error:
                messages.append(Message("user", str(error)))
                break
            if result.observation:
                messages.append(Message("user", result.observation))
            if result.done:
                break
        return Played(task_id, messages, turns, await environment.grade())
    finally:
        await environment.close()
