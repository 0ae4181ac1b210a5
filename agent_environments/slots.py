"""The slots of a pool: how many episodes it plays at a time."""

from __future__ import annotations

import asyncio

from agent_environments.protocol import EnvironmentCrashed


class Slots:
    """Hand out a fixed number of slots, first come, first served; once the pool closes, waiters are refused.

    ``taken`` and ``waiting`` are the counters of ``PoolStatus``.
    """

    def __init__(self, count: int) -> None:
        self.taken = 0
        self.waiting = 0
        self._free = asyncio.Semaphore(count)  # wakes its waiters first come, first served
        self._closed = False

    async def take(self) -> None:
        """Wait for a slot; raises EnvironmentCrashed if the pool is closed or closes during the wait."""
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        if self._closed:
            self._free.release()  # wakes the next, who is refused too
            raise EnvironmentCrashed("the pool is closed")
        self.taken += 1

    def give_back(self) -> None:
        """Free a slot, for the caller that waits longest."""
        self.taken -= 1
        self._free.release()

    def close(self) -> None:
        """Refuse all callers that wait or come later. May be called twice."""
        if not self._closed:
            self._closed = True
            self._free.release()
