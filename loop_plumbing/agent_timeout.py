"""The agent timeout of an episode: it counts the time of the agent's actions, not the time of the machine behind them.

The time runs while an action runs in the world, and while an agent that is a program thinks. It does not run while the
world is brought up or back, while the policy samples, or while either waits its turn: so an episode ends as late on a
slow machine as on a fast one. Whatever else an episode waits for has a deadline of its own, which says that the attempt
has failed, never that the agent was slow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

_current: ContextVar[AgentTimeout | None] = ContextVar("agent_timeout", default=None)


class AgentTimeout:
    """Count down the seconds that are left to an episode's agent."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._since: float | None = None
        self._pauses = 0
        self._running: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let the agent's time run within the block; overlapping blocks count once.

        Raises:
            TimeoutError: the agent's time is used up.
        """
        token = _current.set(self)
        try:
            async with asyncio.timeout(None) as timeout:
                self._running.add(timeout)
                try:
                    self._update()
                    yield
                finally:
                    self._running.discard(timeout)
                    self._update()
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the agent's time within the block, for all blocks of :meth:`running`."""
        self._pauses += 1
        self._update()
        try:
            yield
        finally:
            self._pauses -= 1
            self._update()

    def _update(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._since is not None:
            self._left -= now - self._since
        runs = bool(self._running) and not self._pauses
        self._since = now if runs else None
        end = now + max(0.0, self._left) if runs else None
        for timeout in self._running:
            if not timeout.expired():
                timeout.reschedule(end)


@contextlib.contextmanager
def paused_agent_timeout() -> Iterator[None]:
    """Stop the agent timeout, if any, of the episode whose action runs here: the machine causes the block's delay."""
    agent_timeout = _current.get()
    with contextlib.nullcontext() if agent_timeout is None else agent_timeout.paused():
        yield
