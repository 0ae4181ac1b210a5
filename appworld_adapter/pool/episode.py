"""One AppWorld episode: deadlines, text, and bringing back a world that died. Knows nothing of how a world is run."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_environments.extraction import extract_code
from agent_environments.observation import FAILURE_HEAD, observation
from agent_environments.protocol import (
    EnvironmentCrashed,
    EnvironmentTimeout,
    Grade,
    Message,
    StepResult,
    TokenSpans,
)
from appworld_adapter.prompt import Prompt, TaskCard, task_lines

logger = logging.getLogger(__name__)

KILL_GRACE_S = 5.0
"""How much later than the engine's own alarm a world is killed from outside."""
WORLDS_PER_STEP = 3
"""Worlds a step is tried in. What kills its interpreter in all is the agent's doing; in fewer it may be chance."""
DEATH_OF_INTERPRETER = "the interpreter died"
INTERPRETER_DIED = FAILURE_HEAD + " Traceback:\nThe interpreter ended while it ran this code. The episode is over."


@dataclass(frozen=True)
class Execution:
    """What one program did: ``output``, None if the process that ran it died; ``completed``, as the databases say."""

    output: str | None
    completed: bool


class World(Protocol):
    """A task's world, somewhere, up and waiting."""

    async def execute(self, code: str) -> Execution:
        """Raises EnvironmentCrashed if the world is gone. Has no deadline of its own."""
        ...

    async def give_back(self, usable: bool) -> None:
        """End the world, by force where needed. ``usable`` is false if it was cut short or broke."""
        ...


@dataclass(frozen=True)
class EpisodeRules:
    """What the episodes of a pool have in common."""

    prompt: Prompt
    token_spans: TokenSpans
    observation_max_tokens: int
    execute_timeout_s: float
    episode_timeout_s: float


class EpisodeHost(Protocol):
    """What an episode asks of its pool."""

    root: Path
    rules: EpisodeRules
    replays: int

    def check_tasks(self, task_ids: list[str]) -> None: ...
    async def bring_up(self, card: TaskCard, experiment: str) -> World: ...
    async def grade(self, task_id: str, experiment: str) -> Grade: ...
    async def release(self, environment: AppWorldEnvironment, experiment: str) -> None: ...


class AppWorldEnvironment:
    """One episode. A world that dies is brought back by running the episode's code from the start."""

    def __init__(self, pool: EpisodeHost, episode_id: str) -> None:
        self._pool = pool
        self._rules = pool.rules
        # Slashes would make folders; and two attempts at one episode must not share one.
        self._experiment = f"{episode_id.replace('/', '-')[-80:]}-{secrets.token_hex(4)}"
        self._card: TaskCard | None = None
        self._world: World | None = None
        self._history: list[str] = []
        self._deadline = 0.0
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Raises UnknownTask; EnvironmentCrashed or EnvironmentTimeout if no world can be had."""
        self._pool.check_tasks([task_id])
        self._card = await asyncio.to_thread(TaskCard.load, self._pool.root, task_id)
        self._deadline = time.monotonic() + self._rules.episode_timeout_s
        await self._bring_up()
        return self._rules.prompt.messages(self._card)

    async def step(self, action: str) -> StepResult:
        """Run the action's code.

        Raises:
            EnvironmentTimeout: the code, or the episode, took too long; the world is gone, its state can be graded.
            EnvironmentCrashed: :data:`WORLDS_PER_STEP` worlds died in this step.
        """
        code = extract_code(action)
        execution = await self._execute_or_replay(code)
        self._history.append(code)
        if execution.output is None:  # died of this code in every world it was given: the agent's doing
            execution = Execution(INTERPRETER_DIED, completed=True)
        done = execution.completed
        if done:
            await self._leave(usable=execution.output is not INTERPRETER_DIED)
        rules = self._rules
        shown = observation(
            execution.output, None if done else task_lines(self._card), rules.observation_max_tokens, rules.token_spans
        )
        return StepResult(shown, done, failed=execution.output.startswith(FAILURE_HEAD), empty_action=not code)

    async def _execute_or_replay(self, code: str) -> Execution:
        """Run ``code``; if the world dies, in another one after all that was run before, in :data:`WORLDS_PER_STEP`."""
        if self._world is None:
            raise EnvironmentCrashed("this episode has no world: it was not started, has ended or was killed")
        deaths: list[str] = []
        while True:
            try:
                if deaths:
                    await self._replay(deaths[-1])
                execution = await self._execute(code)
            except EnvironmentCrashed as error:
                deaths.append(str(error))
            else:
                if execution.output is not None:
                    return execution
                deaths.append(DEATH_OF_INTERPRETER)
                if deaths == [DEATH_OF_INTERPRETER] * WORLDS_PER_STEP:
                    return execution
            if len(deaths) == WORLDS_PER_STEP:
                raise EnvironmentCrashed(f"{WORLDS_PER_STEP} worlds died in one step: {'; '.join(deaths)}")

    async def _replay(self, died: str) -> None:
        """Run the episode's code so far in another world; ``died`` says why."""
        task, steps = self._card.task_id, len(self._history)
        logger.warning("world of %s died (%s); replaying %d steps in another", task, died, steps)
        self._pool.replays += 1
        await self._leave(usable=False)
        await self._bring_up()
        for earlier in self._history:
            if (await self._execute(earlier)).output is None:  # it lived through this before: not the agent's doing
                raise EnvironmentCrashed("the interpreter died in the replay")

    async def _bring_up(self) -> None:
        """A world that dies while it starts is replaced, once."""
        try:
            await self._bring_up_once()
        except EnvironmentCrashed as error:
            logger.warning("world of %s died while it started (%s); starting another", self._card.task_id, error)
            await self._bring_up_once()

    async def _bring_up_once(self) -> None:
        async with self._within(self._rules.episode_timeout_s, "starting its world"):
            self._world = await self._pool.bring_up(self._card, self._experiment)

    async def _execute(self, code: str) -> Execution:
        async with self._within(self._rules.execute_timeout_s + KILL_GRACE_S, "running its code"):
            return await self._world.execute(code)

    def _within(self, seconds: float, doing: str) -> _Deadline:
        return _Deadline(self, seconds, self._deadline - time.monotonic(), doing)

    async def _leave(self, usable: bool) -> None:
        if self._world is not None:
            world, self._world = self._world, None
            await world.give_back(usable)

    async def grade(self) -> Grade:
        """Grade the last saved state. Raises EnvironmentCrashed if there is none or the grader died twice."""
        if self._card is None:
            raise EnvironmentCrashed("nothing to grade: the episode was never started")
        return await self._pool.grade(self._card.task_id, self._experiment)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._leave(usable=True)
            await self._pool.release(self, self._experiment)


class _Deadline:
    """Kills the episode's world and raises EnvironmentTimeout when a step's or the episode's time is up."""

    def __init__(self, episode: AppWorldEnvironment, seconds: float, remaining: float, doing: str) -> None:
        self._episode = episode
        self._what = f"{seconds:.0f} s {doing}" if seconds < remaining else f"its episode's time {doing}"
        self._timeout = asyncio.timeout(max(0.0, min(seconds, remaining)))

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError as error:
            await self._episode._leave(usable=False)
            raise EnvironmentTimeout(f"the world used up {self._what} and was killed") from error
        if raised[0] is not None and issubclass(raised[0], asyncio.CancelledError):
            await self._episode._leave(usable=False)
