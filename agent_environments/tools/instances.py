"""Tool processes, a fixed number of them, lent to one episode at a time; each holds an instance where there is a class.

An instance is put into its task's first state when an episode begins, so nothing of the episode before is left. A
process that may be broken (it hung or died, a call on its instance was late or cancelled, the reset failed) is not lent
again: it is ended, and a new one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from agent_environments.forked_process import ForkedProcess, ForkServer, ProcessEnded
from agent_environments.places import Places
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout
from agent_environments.tools.deadline import DeadlinePassed, Raised
from agent_environments.tools.tool import ToolError, WrongArguments

logger = logging.getLogger(__name__)


class _Slot:
    """A place in the pool; without a process while there is none that works."""

    process: ForkedProcess | None = None


class Lease:
    """A process in the hands of one episode, until :meth:`end`."""

    def __init__(self, pool: InstancePool, slot: _Slot) -> None:
        self._pool = pool
        self._slot = slot
        self._ended = False
        self.broken = False
        """Set it where the instance must not be used again."""
        self.lost = False
        """Whether the instance that the episode had is gone, with its process."""
        self._was_reset = False

    async def process(self) -> ForkedProcess:
        """The episode's process, once it makes no other call; where it has ended, a new one.

        Raises:
            EnvironmentCrashed: there is none.
        """
        process = self._slot.process
        if process is not None:
            await process.idle()
        if process is None or not process.alive:
            self.lost = self._was_reset
            process = await self._pool.fill(self._slot)
        return process

    @property
    def holds_instance(self) -> bool:
        """Whether the process holds what an episode cannot go on without."""
        return self._was_reset

    async def reset(self, task_id: str) -> str:
        """Put the instance into the task's first state; returns what it has to show, "" for nothing.

        Raises:
            EnvironmentCrashed: it could not; another instance may.
        """
        self.broken = True
        try:
            shown: str = await (await self.process()).ask("reset", self._pool.deadline_s, task_id=task_id)
        except (Raised, DeadlinePassed, ProcessEnded) as error:
            raise EnvironmentCrashed(f"the instance's reset failed on task {task_id}: {error}") from error
        self.broken, self._was_reset = False, True
        return shown

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """While ``what`` works on the instance: unless it returns, or raises by itself, it may be half done.

        Raises:
            EnvironmentTimeout: it took too long, or the instance is gone.
        """
        if self.lost:
            raise EnvironmentTimeout("the instance is gone, with its process")
        self.broken = True
        try:
            yield
        except DeadlinePassed as error:
            raise EnvironmentTimeout(f"{what} {error}") from error
        except (Raised, ToolError, WrongArguments):
            self.broken = False
            raise
        self.broken = False

    def end(self) -> None:
        """Give the process back; may be called twice."""
        if not self._ended:
            self._ended = True
            self._pool.take_back(self._slot, self.broken)


class InstancePool:
    """``size`` tool processes, each with an instance.

    Args:
        server: forks them.
        deadline_s: for making, resetting and closing an instance. ``close()`` is called where it has one.
    """

    def __init__(self, server: ForkServer, size: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.lent = 0
        self.replaced = 0
        self._server = server
        self._slots = [_Slot() for _ in range(size)]
        self._free = deque(self._slots)
        self._places = Places(size)  # as many are free as there are free slots
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def instances(self) -> int:
        """The number of instances; those that are being replaced are not counted."""
        return sum(slot.process is not None and slot.process.alive for slot in self._slots)

    @property
    def waiting(self) -> int:
        """The number of episodes that wait for an instance."""
        return self._places.waiting

    async def open(self, count: int) -> None:
        """Make so many of them; the others when they are needed.

        Raises:
            EnvironmentCrashed: one could not be made.
        """
        await asyncio.gather(*(self.fill(slot) for slot in list(self._free)[:count]))

    async def acquire(self) -> Lease:
        """One of them; waits its turn while all are lent.

        Raises:
            EnvironmentCrashed: the one before broke, and no new one could be made; or the pool is closed.
        """
        await self._places.take()
        slot = self._free.popleft()
        lease = Lease(self, slot)
        self.lent += 1
        try:
            await lease.process()
        except BaseException:
            lease.end()
            raise
        return lease

    def take_back(self, slot: _Slot, broken: bool) -> None:
        self.lent -= 1
        process = slot.process
        if self._closed or process is None or not (broken or process.busy or not process.alive):
            self._set_free(slot)
            return
        task = asyncio.ensure_future(self._replace(slot))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def close(self) -> None:
        """Refuse who waits, and close every instance; those still lent too."""
        self._closed = True
        self._places.close()
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(self._empty(slot) for slot in self._slots))
        await self._server.close()

    async def _replace(self, slot: _Slot) -> None:
        try:
            await self.fill(slot)
        except EnvironmentCrashed as error:
            logger.error("%s; it is tried again when an episode needs it", error)
        finally:
            self._set_free(slot)

    def _set_free(self, slot: _Slot) -> None:
        self._free.appendleft(slot)  # rather one that has a process than one that never had
        self._places.give_back()

    async def fill(self, slot: _Slot) -> ForkedProcess:
        """Put a new process into a slot, in the place of the one that is there.

        Raises:
            EnvironmentCrashed: it could not be made.
        """
        if slot.process is not None:
            self.replaced += 1
            await self._empty(slot)
        process = await self._server.fork()
        try:
            await process.ask("make", self.deadline_s)
        except BaseException as error:
            await _end(process)
            if isinstance(error, Raised | DeadlinePassed | ProcessEnded):
                raise EnvironmentCrashed(f"an instance could not be made: {error}") from error
            raise
        slot.process = process
        return process

    async def _empty(self, slot: _Slot) -> None:
        process, slot.process = slot.process, None
        if process is None or not process.alive:
            return
        process.interrupt()
        try:
            await process.ask("close", self.deadline_s)
        except (Raised, DeadlinePassed, ProcessEnded, EnvironmentCrashed) as error:
            logger.warning("closing an instance failed: %s", error)
        await _end(process)


async def _end(process: ForkedProcess) -> Any:
    """End a process that has not ended with its server."""
    try:
        if process.alive:
            await process.end()
    except EnvironmentCrashed as error:
        logger.warning("%s", error)
