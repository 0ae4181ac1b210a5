"""Serves an environment to one client, whichever protocol it speaks."""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.observation import FAILURE_HEAD
from agent_environments.protocol import (
    EnvironmentPool,
    EnvironmentTimeout,
    Message,
    StepResult,
    UnknownTask,
    acquire,
)
from loop_plumbing import running_time

ACQUIRE_DEADLINE_S = 600.0
CLOSE_DEADLINE_S = 300.0
UNKNOWN_SESSION = "unknown_session"
"""Reason of the error about a session that the server does not know (any more)."""


class NoEpisode(Exception):
    """The session has no episode to step or grade."""


class SessionEnded(NoEpisode):
    """The session ended while this call waited for its turn."""

    reason = UNKNOWN_SESSION


@dataclass(frozen=True)
class ServedAnswer:
    """An observation as both protocols send it. ``reward`` is the grader's once the episode is done, and 0 before."""

    result: StepResult
    reward: float = 0.0
    reason: str | None = None
    """Reason of the fault which ended the episode, for clients of this project."""
    messages: Sequence[Message] = ()
    """The whole opening, for clients of this project; the result's observation is its text."""


class ServedTasks:
    """The tasks of a pool. A task is found by split and index, by its position among all tasks, or by id."""

    def __init__(self, pool: EnvironmentPool, splits: Sequence[str]) -> None:
        self.by_split = {split: pool.tasks(split) for split in splits}
        self._all = [task for tasks in self.by_split.values() for task in tasks]

    def split(self, name: Any) -> list[str]:
        """Return the task ids of a split. Raises UnknownTask."""
        if not isinstance(name, str) or name not in self.by_split:
            raise UnknownTask(f"no split {reprlib.repr(name)}; there are {', '.join(self.by_split)}")
        return self.by_split[name]

    def at(self, index: Any, split: Any = None) -> str:
        """Return the task at ``index`` in a split, or else in the sequence of all splits. Raises UnknownTask."""
        tasks = self._all if split is None else self.split(split)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(tasks):
            raise UnknownTask(f"no task {reprlib.repr(index)}: the index is from 0 to {len(tasks) - 1}")
        return tasks[index]

    def asked_for(self, index: Any, seed: Any, split: Any = None) -> str:
        """Return the task at ``index``, or else a task drawn by ``seed``, or else the first. Raises UnknownTask."""
        if index is None and isinstance(seed, int):
            return self.at(seed % len(self._all if split is None else self.split(split)), split)
        return self.at(0 if index is None else index, split)


class ServedSession:
    """Plays the episodes of one client one after another. Simultaneous calls wait for each other."""

    def __init__(self, pool: EnvironmentPool, name: str) -> None:
        self.name = name
        self.steps = 0
        self.last = ServedAnswer(StepResult("", done=False, failed=False))
        self._pool = pool
        self._environment: GuardedEnvironment | None = None
        self._turn = asyncio.Lock()
        self._used = running_time.now()
        self._closed = False

    def idle_s(self) -> float:
        """Return the seconds since the session was last used; 0 during a call."""
        return 0.0 if self._turn.locked() else running_time.now() - self._used

    def touch(self) -> None:
        """Record that the session was used now."""
        self._used = running_time.now()

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Wait for the turn of a call. Raises SessionEnded if the session was closed before the turn came, because
        nobody would end an episode begun later.
        """
        async with self._turn:
            if self._closed:
                raise SessionEnded("the session has ended")
            try:
                yield
            finally:
                self.touch()

    async def reset(self, task_id: str) -> ServedAnswer:
        """End the previous episode and begin a new one.

        Raises:
            EnvironmentFault: as for the environment's ``start``.
            NoEpisode: the session has ended.
            TimeoutError: the pool had no free place in time.
        """
        async with self._call():
            await self._end()
            self._pool.check_tasks([task_id])
            async with asyncio.timeout(ACQUIRE_DEADLINE_S):
                self._environment = GuardedEnvironment(await acquire(self._pool, self.name, task_id))
            messages = await self._environment.start(task_id)
            text = "\n\n".join(message.content for message in messages)
            opened = StepResult(text, done=False, failed=False)
            self.steps, self.last = 0, ServedAnswer(opened, messages=messages)
            return self.last

    async def step(self, action: str) -> ServedAnswer:
        """Run one action. After the end of the episode, return the last answer again. An action that takes too long
        ends its episode with a grade. Without a grade a trainer might drop the episode, and an agent could void
        episodes with slow actions.

        Raises:
            NoEpisode, EnvironmentFault: there is no episode, the session has ended, or as the environment's ``step``.
        """
        async with self._call():
            environment = self._running
            if self.last.result.done:
                return self.last
            reason = None
            try:
                result = await environment.step(action)
            except EnvironmentTimeout as error:
                result, reason = StepResult(f"{FAILURE_HEAD} {error}", done=True, failed=True), error.reason
            self.steps += 1
            reward = (await environment.grade()).reward if result.done else 0.0
            self.last = ServedAnswer(result, reward, reason)
            return self.last

    async def grade(self) -> dict[str, Any]:
        """Return the grade of the present state. Raises NoEpisode, and the errors of the environment's ``grade``."""
        async with self._call():
            return asdict(await self._running.grade())

    @property
    def _running(self) -> GuardedEnvironment:
        if self._environment is None:
            raise NoEpisode("reset first: there is no episode")
        return self._environment

    async def _end(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await environment.close()

    async def close(self) -> None:
        """End the episode, after a running call has ended."""
        self._closed = True
        async with self._turn:
            await self._end()
