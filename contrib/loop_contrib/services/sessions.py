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
    """The session has no episode that could be stepped or graded."""


class SessionEnded(NoEpisode):
    """The session has ended while the call waited for it."""

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
    """The tasks of a pool, by split and index, by position in all of them, and by id."""

    def __init__(self, pool: EnvironmentPool, splits: Sequence[str]) -> None:
        self.by_split = {split: pool.tasks(split) for split in splits}
        self._all = [task for tasks in self.by_split.values() for task in tasks]

    def split(self, name: Any) -> list[str]:
        """Raises UnknownTask."""
        if not isinstance(name, str) or name not in self.by_split:
            raise UnknownTask(f"no split {reprlib.repr(name)}; there are {', '.join(self.by_split)}")
        return self.by_split[name]

    def at(self, index: Any, split: Any = None) -> str:
        """Return the task at ``index`` of a split, or of all splits one after another; raises UnknownTask."""
        tasks = self._all if split is None else self.split(split)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(tasks):
            raise UnknownTask(f"no task {reprlib.repr(index)}: the index is from 0 to {len(tasks) - 1}")
        return tasks[index]

    def asked_for(self, index: Any, seed: Any, split: Any = None) -> str:
        """Return the task at ``index``, else the one that ``seed`` draws, else the first; raises UnknownTask."""
        if index is None and isinstance(seed, int):
            return self.at(seed % len(self._all if split is None else self.split(split)), split)
        return self.at(0 if index is None else index, split)


class ServedSession:
    """The episodes of one client, one after another. Calls come one at a time."""

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
        """Return seconds since it was last used; 0 while a call is under way."""
        return 0.0 if self._turn.locked() else running_time.now() - self._used

    def touch(self) -> None:
        """Note that the session is in use."""
        self._used = running_time.now()

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Raises SessionEnded for a call that came after :meth:`close`, or waited for it: nobody would end its
        episode.
        """
        async with self._turn:
            if self._closed:
                raise SessionEnded("the session has ended")
            try:
                yield
            finally:
                self.touch()

    async def reset(self, task_id: str) -> ServedAnswer:
        """Begin an episode, and end the one before.

        Raises:
            EnvironmentFault: as the environment's ``start``.
            NoEpisode: the session has ended.
            TimeoutError: no place was free in time.
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
        """Run one action. After the end of the episode, the last answer is repeated. An action that takes too long
        ends its episode in a grade, as any other does: a trainer that drops what failed would let its agent void
        episodes.

        Raises:
            NoEpisode, EnvironmentFault: nothing was reset, or the session has ended, or as the environment's ``step``.
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
        """Return the grader's verdict on the present state; raises as the environment's ``grade``, and NoEpisode."""
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
        """End the episode; a call that is under way ends first."""
        self._closed = True
        async with self._turn:
            await self._end()
