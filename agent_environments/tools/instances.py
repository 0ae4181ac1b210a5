"""Instances that stateful tools work on: a fixed number of them, lent to one episode at a time.

An instance is put into its task's first state when an episode begins, so nothing of the episode before is left. One
that may be broken (a call or the reward timed out or was cancelled on it, or its reset failed) is not lent again: it is
closed, and a new one takes its place.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from agent_environments.places import Places
from agent_environments.protocol import EnvironmentCrashed
from agent_environments.tools import deadline

logger = logging.getLogger(__name__)


class _Slot:
    """A place in the pool; ``filled`` is false while there is no instance that works."""

    def __init__(self) -> None:
        self.instance: Any = None
        self.filled = False


class Lease:
    """An instance in the hands of one episode, until :meth:`end`."""

    def __init__(self, pool: InstancePool, slot: _Slot) -> None:
        self._pool = pool
        self._slot = slot
        self._ended = False
        self.broken = False
        """Set it where the instance must not be used again."""

    @property
    def instance(self) -> Any:
        return self._slot.instance

    async def reset(self, task: Mapping[str, Any]) -> str:
        """Put the instance into the task's first state; returns what it has to show, "" for nothing.

        Raises:
            EnvironmentCrashed: it could not; another instance may.
        """
        self.broken = True
        try:
            own = copy.deepcopy(dict(task))  # what it changes in there must not reach the reward, or another episode
            reset = functools.partial(self.instance.reset, own)  # whatever it calls its parameter
            shown = await deadline.call(reset, {}, self._pool.deadline_s)
        except (deadline.Raised, deadline.DeadlinePassed) as error:
            raise EnvironmentCrashed(f"the instance's reset failed on task {task['id']}: {error}") from error
        self.broken = False
        return "" if shown is None else str(shown)

    def end(self) -> None:
        """Give the instance back; may be called twice."""
        if not self._ended:
            self._ended = True
            self._pool.take_back(self._slot, self.broken)


class InstancePool:
    """``size`` instances, made when the pool opens.

    Args:
        make: makes one; runs in a thread. ``close()`` of an instance is called where it has one.
        deadline_s: for making, resetting and closing one.
    """

    def __init__(self, make: Callable[[], Any], size: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.lent = 0
        self.replaced = 0
        self._make = make
        self._slots = [_Slot() for _ in range(size)]
        self._free = deque(self._slots)
        self._places = Places(size)  # as many are free as there are free slots
        self._replacing: set[asyncio.Task[None]] = set()

    @property
    def instances(self) -> int:
        """How many there are; those that are being replaced are not counted."""
        return sum(slot.filled for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Who waits for an instance."""
        return self._places.waiting

    async def open(self) -> None:
        """Make all instances.

        Raises:
            EnvironmentCrashed: one could not be made.
        """
        await asyncio.gather(*(self._fill(slot) for slot in self._slots))

    async def acquire(self) -> Lease:
        """An instance; waits its turn while all are lent.

        Raises:
            EnvironmentCrashed: the one before broke, and no new one could be made; or the pool is closed.
        """
        await self._places.take()
        slot = self._free.popleft()
        if not slot.filled:
            try:
                await self._fill(slot)
            except BaseException:
                self._set_free(slot)
                raise
        self.lent += 1
        return Lease(self, slot)

    def take_back(self, slot: _Slot, broken: bool) -> None:
        self.lent -= 1
        if not broken or not slot.filled:  # not filled: the pool has closed, and nothing takes its place
            self._set_free(slot)
            return
        task = asyncio.ensure_future(self._replace(slot))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def close(self) -> None:
        """Refuse who waits, and close every instance; those still lent too."""
        self._places.close()
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(self._empty(slot) for slot in self._slots))

    async def _replace(self, slot: _Slot) -> None:
        self.replaced += 1
        try:
            await self._empty(slot)
            await self._fill(slot)
        except EnvironmentCrashed as error:
            logger.error("%s; it is tried again when an episode needs it", error)
        finally:
            self._set_free(slot)

    def _set_free(self, slot: _Slot) -> None:
        self._free.append(slot)
        self._places.give_back()

    async def _fill(self, slot: _Slot) -> None:
        try:
            slot.instance = await deadline.call(self._make, {}, self.deadline_s)
        except (deadline.Raised, deadline.DeadlinePassed) as error:
            raise EnvironmentCrashed(f"an instance could not be made: {error}") from error
        slot.filled = True

    async def _empty(self, slot: _Slot) -> None:
        instance, slot.instance, slot.filled = slot.instance, None, False
        close = getattr(instance, "close", None)
        if close is None:
            return
        try:
            await deadline.call(close, {}, self.deadline_s)
        except (deadline.Raised, deadline.DeadlinePassed) as error:
            logger.warning("closing an instance failed: %s", error)
