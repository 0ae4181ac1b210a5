"""One episode at the end of a line: deadlines, and bringing back a world whose line was lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from agent_environments.observation import FAILURE_HEAD
from agent_environments.own_time import not_the_agents
from agent_environments.protocol import (
    Broke,
    EnvironmentCrashed,
    EnvironmentTimeout,
    Grade,
    Message,
    Requirement,
    StepResult,
    TokenSpans,
    ToolUse,
)
from agent_environments.remote.line import Line, LineGone, LineLost, LineStuck, RequestFailed

logger = logging.getLogger(__name__)

LOSSES_PER_REQUEST = 3
"""Lines that may be lost while they work on one request of an episode; after that it is the agent's doing."""
GONE_PER_REQUEST = 10
"""Lines that may have ended before they were asked, by the doing of others; after that the attempt has failed."""
CLOSE_TIMEOUT_S = 120.0
STEP_BROKE = FAILURE_HEAD + " The world broke while it ran this command. The episode is over."

_numbers = itertools.count(1)


@dataclass(frozen=True)
class EpisodeRules:
    """What the episodes of a pool have in common."""

    token_spans: TokenSpans
    observation_max_tokens: int
    step_timeout_s: float
    start_timeout_s: float


class EpisodeHost(Protocol):
    """What an episode asks of its pool."""

    rules: EpisodeRules
    replays: int
    no_command: str
    """What the agent is told after a message without a command."""

    def check_tasks(self, task_ids: list[str]) -> None: ...
    async def lease(self) -> Line:
        """A line to where there is room for one more episode; raises EnvironmentCrashed if there is none."""
        ...

    async def give_back(self, line: Line) -> None: ...

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        """The messages that open an episode, of the answer to "start"."""
        ...

    def command(self, message: str) -> str | None:
        """What of an assistant message is sent; None for a message without a command."""
        ...

    def shown(self, observation: str) -> str:
        """What the agent is shown of the observation in an answer to "step"."""
        ...

    def release(self, environment: RemoteEnvironment) -> None: ...


class _AgentsDoing(Exception):
    """The world cannot be brought back, and the agent may be the reason: there is nothing left to grade."""


class RemoteEnvironment:
    """One episode.

    A line that is lost is replaced, and the episode's commands are run again on the new one: the observations must be
    the same. An agent cannot undo what it did: a command over which :data:`LOSSES_PER_REQUEST` lines were lost, or one
    that takes too long, ends the episode, and what cannot be had any more is ungradable.
    """

    def __init__(self, pool: EpisodeHost) -> None:
        self._pool = pool
        self._rules = pool.rules
        self._number = next(_numbers)
        self._line: Line | None = None
        self._task_id: str | None = None
        self._opening: dict[str, Any] = {}
        self._history: list[tuple[str, dict[str, Any]]] = []
        self._over = False
        self._ungradable: str | None = None
        self._running: asyncio.Task[StepResult] | None = None
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Raises UnknownTask; EnvironmentCrashed if it cannot be started anywhere."""
        self._pool.check_tasks([task_id])
        self._task_id = task_id
        losses: list[str] = []
        while len(losses) < LOSSES_PER_REQUEST:
            try:
                self._opening = await self._start_on_a_line()
            except (LineGone, LineLost, LineStuck) as error:
                losses.append(str(error))
            except RequestFailed as error:
                raise EnvironmentCrashed(f"the world cannot start {task_id}: {error}") from error
            else:
                return self._pool.opening(self._opening)
        raise EnvironmentCrashed(f"{task_id} could not be started: {'; '.join(losses)}")

    async def _start_on_a_line(self) -> dict[str, Any]:
        await self._leave()
        self._line = await self._pool.lease()
        return await self._line.call(
            self._rules.start_timeout_s, "start", episode=self._number, task=str(self._task_id)
        )

    async def step(self, action: str) -> StepResult:
        """Run the message's command.

        Raises:
            EnvironmentTimeout: it took too long; the episode is over.
            EnvironmentCrashed: the worlds died by no doing of this episode's.
        """
        if self._task_id is None or self._over:
            raise EnvironmentCrashed("this episode has no world: it was not started, or has ended")
        command = self._pool.command(action)
        if command is None:
            return StepResult(self._pool.no_command, done=False, failed=False, empty_action=True)
        self._running = asyncio.create_task(self._step(command))
        return await asyncio.shield(self._running)  # cancelled or not, what it does is done and will be graded

    async def _step(self, command: str) -> StepResult:
        try:
            answer = await self._ask(self._rules.step_timeout_s, "step", command=command)
        except LineStuck as error:
            self._end(f"the last command was cut short, and its world with it: {error}")
            raise EnvironmentTimeout(str(error)) from error
        except _AgentsDoing as error:
            self._end(str(error))
            return StepResult(STEP_BROKE, done=True, failed=True)
        except RequestFailed as error:
            self._over = True
            if error.reason == EnvironmentCrashed.reason:
                raise EnvironmentCrashed(str(error)) from error
            logger.warning("%s: the world broke in a step, which ends the episode: %s", self._task_id, error)
            return StepResult(STEP_BROKE, done=True, failed=True, broke=Broke("step", str(error)))
        self._history.append((command, answer))
        self._over = answer["done"]
        if answer.get("reason") == EnvironmentTimeout.reason:
            raise EnvironmentTimeout(answer["observation"])
        empty = answer.get("empty_action", False)
        text, reminder = answer["observation"], answer.get("reminder", "")
        output = text.removesuffix(reminder)
        kept = text[len(output) :]  # "" where it does not end so
        shown = self._pool.shown(output) + kept
        return StepResult(shown, answer["done"], failed=answer["failed"], empty_action=empty, reminder=kept)

    def _end(self, ungradable: str) -> None:
        self._over, self._ungradable = True, ungradable

    async def _ask(self, deadline_s: float, op: str, **fields: Any) -> dict[str, Any]:
        """The answer of the episode's world, which is brought back where that is needed.

        Raises:
            RequestFailed, LineStuck: as it says.
            _AgentsDoing: the world died too often while it worked for this episode, or comes back as another.
            EnvironmentCrashed: the same, but never while it worked for this episode.
        """
        losses: list[str] = []
        for _ in range(GONE_PER_REQUEST):
            try:
                if self._line is None or not self._line.alive:
                    with not_the_agents():
                        await self._bring_back()
                return await self._leased.call(deadline_s, op, episode=self._number, **fields)
            except LineGone as error:
                gone = str(error)
            except LineLost as error:
                losses.append(gone := str(error))
                if len(losses) == LOSSES_PER_REQUEST:
                    raise _AgentsDoing(
                        f"{len(losses)} worlds were lost over one command: {'; '.join(losses)}"
                    ) from error
            except _Diverged as error:
                if losses:
                    raise _AgentsDoing(f"{losses[-1]}; {error}") from error
                raise EnvironmentCrashed(f"a world was lost, and {error}") from error
            await self._leave()
        raise EnvironmentCrashed(f"{GONE_PER_REQUEST} worlds in a row had ended before they were asked: {gone}")

    async def _bring_back(self) -> None:
        """Play the episode so far on another line."""
        logger.warning("the world of %s ended; replaying %d commands in another", self._task_id, len(self._history))
        self._pool.replays += 1
        try:
            same = await self._start_on_a_line() == self._opening
            for command, answer in self._history:
                if not same:
                    break
                replayed = await self._leased.call(
                    self._rules.step_timeout_s, "step", episode=self._number, command=command
                )
                same = replayed == answer
        except (RequestFailed, LineStuck) as error:  # it lived through this before
            raise _Diverged(f"the world fails in the replay: {error}") from error
        if not same:
            raise _Diverged("its world answers differently in the replay")

    @property
    def _leased(self) -> Line:
        if self._line is None:
            raise LineGone("the episode has no line")
        return self._line

    async def grade(self) -> Grade:
        """The world's own score of the state reached so far.

        Raises:
            EnvironmentCrashed: the episode was never started, or nothing was done and there is no grade.
        """
        if self._task_id is None:
            raise EnvironmentCrashed("nothing to grade: the episode was never started")
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._ungradable is None:
            try:
                answer = await self._ask(self._rules.step_timeout_s, "grade")
                return _grade(answer)
            except (RequestFailed, LineStuck, _AgentsDoing) as error:
                if self._running is None:
                    raise EnvironmentCrashed(
                        f"{self._task_id} has no grade, though nothing was done: {error}"
                    ) from error
                self._end(f"no grade: {error}")
        return Grade.of_ungradable(self._ungradable or "no grade")

    async def _leave(self) -> None:
        if self._line is not None:
            line, self._line = self._line, None
            await self._pool.give_back(line)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        try:
            if self._line is not None and self._line.alive:
                with contextlib.suppress(LineGone, LineLost, LineStuck, RequestFailed):
                    await self._line.call(CLOSE_TIMEOUT_S, "close", episode=self._number)
        finally:
            await self._leave()
            self._pool.release(self)


def _grade(answer: dict[str, Any]) -> Grade:
    requirements = tuple(Requirement(**requirement) for requirement in answer.get("requirements", ()))
    tampered, ungradable, broke = answer.get("tampered"), answer.get("ungradable"), answer.get("broke")
    return Grade(
        float(answer["reward"]),
        bool(answer["success"]),
        requirements,
        tampered,
        ungradable,
        broke=None if broke is None else Broke(**broke),
        tools=tuple(ToolUse(**use) for use in answer.get("tools", ())),
    )


class _Diverged(Exception):
    """The replayed episode is not the one that was lost."""
