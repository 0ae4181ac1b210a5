"""Whether a server that does not answer is slow or hangs: what its processes do since it was first missed."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from loop_plumbing.moving import processor_use

HANG_S = 120.0
"""What has work to do, and for so long neither uses nor wants a processor or a disk, nor writes into its log, hangs."""
MOVED_S = 0.2
"""Processor time that counts as a move; what only looks now and then whether something has come uses less."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Movement:
    """The activity of a process, of all below it, and of their log, since this was made. ``pid`` and ``log`` are both
    None where the process is on another machine."""

    def __init__(self, pid: int | None, log: Path | None) -> None:
        self._pid = pid
        self._log = log
        self._began = self._moved_at = time.monotonic()
        self._first: int | None = None
        self._marked = 0
        self._size: int | None = None
        self.spent_s = 0.0
        """Processor time that they used, all together."""

    async def look(self) -> bool:
        """Look now; returns whether they have moved since the last move that was seen."""
        if (pid := self._pid) is None:
            return False
        # The log's size too: it lies where the server writes it, and it is looked at when that may have stalled.
        (ticks, busy), size = await asyncio.to_thread(lambda: (processor_use(pid), self._log_size()))
        if self._first is None:
            self._first = self._marked = ticks
            self._size = size
        moved = busy or size != self._size or ticks - self._marked >= MOVED_S * _TICKS_PER_S
        if moved:
            self._marked, self._size, self._moved_at = ticks, size, time.monotonic()
        self.spent_s = max(self.spent_s, (ticks - self._first) / _TICKS_PER_S)
        return moved

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log is not None and self._log.exists() else 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def idle_s(self) -> float:
        """Seconds since the last move; for what is somewhere else, since the beginning."""
        return time.monotonic() - self._moved_at
