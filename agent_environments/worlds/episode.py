"""One episode in a worker: deadlines, and bringing back a world whose worker died. Knows nothing of any world."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from agent_environments.observation import FAILURE_HEAD, observation
from agent_environments.protocol import (
    EnvironmentCrashed,
    EnvironmentTimeout,
    Grade,
    Message,
    StepResult,
    TokenSpans,
)
from agent_environments.worlds.commands import COMMAND_FORMAT, command_of
from agent_environments.worlds.worker_process import (
    RequestFailed,
    WorkerGone,
    WorkerLost,
    WorkerProcess,
    WorkerStuck,
)

logger = logging.getLogger(__name__)

LOSSES_PER_REQUEST = 3
"""Workers that may be lost while they work on one request of an episode; after that it is the agent's doing."""
GONE_PER_REQUEST = 10
"""Workers that may have ended before they were asked, by the doing of others; after that the attempt has failed."""
CLOSE_TIMEOUT_S = 30.0
NO_COMMAND = "There is no command in this message."
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

    def check_tasks(self, task_ids: list[str]) -> None: ...
    async def lease(self) -> WorkerProcess:
        """A worker with room for one more episode; raises WorkerLost if none can be started."""
        ...

    def give_back(self, worker: WorkerProcess) -> None: ...
    def release(self, environment: WorldEnvironment) -> None: ...


class _AgentsDoing(Exception):
    """The world cannot be brought back, and the agent may be the reason: there is nothing left to grade."""


class WorldEnvironment:
    """One episode.

    A worker that dies is replaced, and the episode's commands are run again in the new one: the observations must be
    the same. An agent cannot undo what it did: a command over which :data:`LOSSES_PER_REQUEST` workers died, or one
    that takes too long, ends the episode, and what cannot be had any more is ungradable.
    """

    def __init__(self, pool: EpisodeHost) -> None:
        self._pool = pool
        self._rules = pool.rules
        self._number = next(_numbers)
        self._worker: WorkerProcess | None = None
        self._task_id: str | None = None
        self._opening: dict[str, Any] = {}
        self._history: list[tuple[str, dict[str, Any]]] = []
        self._over = False
        self._ungradable: str | None = None
        self._running: asyncio.Task[StepResult] | None = None
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Raises UnknownTask; EnvironmentCrashed if no worker can start the task."""
        self._pool.check_tasks([task_id])
        self._task_id = task_id
        losses: list[str] = []
        while len(losses) < LOSSES_PER_REQUEST:
            try:
                self._opening = await self._start_in_a_worker()
            except (WorkerGone, WorkerLost, WorkerStuck) as error:
                losses.append(str(error))
            except RequestFailed as error:
                raise EnvironmentCrashed(f"the world cannot start {task_id}: {error}") from error
            else:
                instructions = f"{self._opening['instructions']}\n\n{COMMAND_FORMAT}"
                return [Message("system", instructions), Message("user", self._shown(self._opening["observation"]))]
        raise EnvironmentCrashed(f"no worker could start {task_id}: {'; '.join(losses)}")

    async def _start_in_a_worker(self) -> dict[str, Any]:
        self._leave()
        self._worker = await self._pool.lease()
        return await self._worker.call(
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
        command = command_of(action)
        if not command:
            return StepResult(NO_COMMAND, done=False, failed=False, empty_action=True)
        self._running = asyncio.create_task(self._step(command))
        return await asyncio.shield(self._running)  # cancelled or not, what it does is done and will be graded

    async def _step(self, command: str) -> StepResult:
        try:
            answer = await self._ask(self._rules.step_timeout_s, "step", command=command)
        except WorkerStuck as error:
            self._end(f"the last command was cut short, and its world with it: {error}")
            raise EnvironmentTimeout(str(error)) from error
        except _AgentsDoing as error:
            self._end(str(error))
            return StepResult(STEP_BROKE, done=True, failed=True)
        except RequestFailed as error:
            logger.warning("%s: the world broke in a step, which ends the episode: %s", self._task_id, error)
            self._over = True
            return StepResult(STEP_BROKE, done=True, failed=True)
        self._history.append((command, answer))
        self._over = answer["done"]
        return StepResult(self._shown(answer["observation"]), answer["done"], answer["failed"])

    def _end(self, ungradable: str) -> None:
        self._over, self._ungradable = True, ungradable

    def _shown(self, text: str) -> str:
        return observation(text, None, self._rules.observation_max_tokens, self._rules.token_spans)

    async def _ask(self, deadline_s: float, op: str, **fields: Any) -> dict[str, Any]:
        """The answer of the episode's world, which is brought back where that is needed.

        Raises:
            RequestFailed, WorkerStuck: as it says.
            _AgentsDoing: the world died too often while it worked for this episode, or comes back as another.
            EnvironmentCrashed: the same, but never while it worked for this episode.
        """
        losses: list[str] = []
        for _ in range(GONE_PER_REQUEST):
            try:
                if self._worker is None or not self._worker.alive:
                    await self._bring_back()
                return await self._leased.call(deadline_s, op, episode=self._number, **fields)
            except WorkerGone as error:
                gone = str(error)
            except WorkerLost as error:
                losses.append(gone := str(error))
                if len(losses) == LOSSES_PER_REQUEST:
                    raise _AgentsDoing(
                        f"{len(losses)} worlds were lost over one command: {'; '.join(losses)}"
                    ) from error
            except _Diverged as error:
                if losses:
                    raise _AgentsDoing(f"{losses[-1]}; {error}") from error
                raise EnvironmentCrashed(f"a worker died, and {error}") from error
            self._leave()
        raise EnvironmentCrashed(f"{GONE_PER_REQUEST} workers in a row had ended before they were asked: {gone}")

    async def _bring_back(self) -> None:
        """Play the episode so far in another worker."""
        logger.warning("the worker of %s ended; replaying %d commands in another", self._task_id, len(self._history))
        self._pool.replays += 1
        try:
            same = await self._start_in_a_worker() == self._opening
            for command, answer in self._history:
                if not same:
                    break
                replayed = await self._leased.call(
                    self._rules.step_timeout_s, "step", episode=self._number, command=command
                )
                same = replayed == answer
        except (RequestFailed, WorkerStuck) as error:  # it lived through this before
            raise _Diverged(f"the world fails in the replay: {error}") from error
        if not same:
            raise _Diverged("its world answers differently in the replay")

    @property
    def _leased(self) -> WorkerProcess:
        if self._worker is None:
            raise WorkerGone("the episode has no worker")
        return self._worker

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
                return Grade(reward=float(answer["reward"]), success=bool(answer["success"]))
            except (RequestFailed, WorkerStuck, _AgentsDoing) as error:
                if self._running is None:
                    raise EnvironmentCrashed(
                        f"{self._task_id} has no grade, though nothing was done: {error}"
                    ) from error
                self._end(f"no grade: {error}")
        return Grade.of_ungradable(self._ungradable or "no grade")

    def _leave(self) -> None:
        if self._worker is not None:
            self._pool.give_back(self._worker)
            self._worker = None

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        try:
            if self._worker is not None and self._worker.alive:
                with contextlib.suppress(WorkerGone, WorkerLost, WorkerStuck, RequestFailed):
                    await self._worker.call(CLOSE_TIMEOUT_S, "close", episode=self._number)
        finally:
            self._leave()
            self._pool.release(self)


class _Diverged(Exception):
    """The replayed episode is not the one that was lost."""
