"""A line to the place where an episode is played: one request at a time, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agent_environments.lost_worlds import Loss, Losses, WorldLost
from loop_plumbing.agent_timeout import paused_agent_timeout


class LineStuck(Exception):
    """The request took longer than its deadline; the line was cut."""


class RequestFailed(Exception):
    """The other side lives and reports an error. ``reason`` is the word of its ``EnvironmentFault``, if it sent one."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class WorldLine:
    """A connection to a world's process; several callers may await :meth:`call` at once and are served in turn."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._turn = asyncio.Lock()
        self._exchanges: set[asyncio.Task[dict[str, Any]]] = set()

    @property
    def alive(self) -> bool:
        """Return whether a request may be sent."""
        raise NotImplementedError

    async def _round_trip(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer; raises WorldLost or RequestFailed."""
        raise NotImplementedError

    def kill(self) -> None:
        """Cut the line at once; this also ends everything that runs on the other side."""
        raise NotImplementedError

    async def last_words(self) -> str:
        """Return the last output of the other side before it ended; "" if there was none."""
        return ""

    @property
    def busy(self) -> bool:
        """Return whether a request is being answered."""
        return self._turn.locked()

    def _ended(self) -> None:
        """Note that the other side ended. If it ended between two requests, no command is the cause."""
        if not self._turn.locked():
            self._losses.note(self)

    async def call(self, deadline_s: float, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return its answer. The deadline counts from the time when the other side is free.

        If a caller is cancelled, its request still runs to the end, so that the next caller finds the line in order.

        Raises:
            WorldLost, LineStuck: the line has been cut.
            RequestFailed: the world raised.
        """
        exchange = asyncio.create_task(self._exchange(deadline_s, {"op": op, **fields}))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._forget)
        return await asyncio.shield(exchange)

    def _forget(self, exchange: asyncio.Task[dict[str, Any]]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # its caller may be gone, and nobody else would retrieve it

    async def _exchange(self, deadline_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        with paused_agent_timeout():
            await self._turn.acquire()
        try:
            if not self.alive:
                words = await self.last_words()
                raise WorldLost(f"the other side had ended before it was asked{': ' * bool(words)}{words}", Loss.GONE)
            try:
                return await self._in_time(deadline_s, request)
            except TimeoutError as error:
                self.kill()
                how = f": the other side {error}" if str(error) else f" within {deadline_s:g} s"
                raise LineStuck(f"no answer to {request['op']!r}{how}") from error
            except WorldLost:
                self.kill()
                raise
        finally:
            self._turn.release()

    async def _in_time(self, deadline_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run :meth:`_round_trip`; raises TimeoutError if the answer takes too long."""
        async with asyncio.timeout(deadline_s):
            return await self._round_trip(request)

    async def hang_up(self) -> None:
        """Cut the line and wait until no request is under way."""
        self.kill()
        for exchange in self._exchanges:
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
