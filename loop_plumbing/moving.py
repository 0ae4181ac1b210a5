"""Waits for a process that may be slow as long as it makes progress: as long as it, or a process below it, uses or
wants a processor or a disk, or writes into its log.

A process that waits in turn for this one needs a sign of life, and cannot see those below: :func:`signs` counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from loop_plumbing import process_guard, running_time

POLL_S = 1.0
STALL_S = 120.0
"""Seconds without progress after which a process that has work to do counts as hung."""
LIMIT_S = 3600.0
"""Last resort, in seconds: for a process that computes for ever."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


class _Signs:
    count = 0


def signs() -> int:
    """Return how often something that this process waits for has moved or become ready."""
    return _Signs.count


def give_sign() -> None:
    """Count a sign of life."""
    _Signs.count += 1


class Stalled(TimeoutError):
    """A wait was given up: the processes hung or, if ``moves`` is true, were still at work after the limit. The message
    says which."""

    def __init__(self, how: str, moves: bool) -> None:
        super().__init__(how)
        self.moves = moves


class Movement:
    """Watch the activity of a process, of all processes below it, and of their log, from now on.

    Args:
        pid: the process's id; None if the process is on another machine, whose activity we cannot see.
        log: the file to which the processes write; None if there is none.
        least_s: processor time that counts as a move.
    """

    def __init__(self, pid: int | None, log: Path | None = None, least_s: float = 0.0) -> None:
        self._pid = pid
        self._log = log
        self._least = max(1.0, least_s * _TICKS_PER_S)
        self._began = self._moved_at = running_time.now()
        self._first: int | None = None
        self._marked = 0
        self._size: int | None = None
        self.spent_s = 0.0
        """Processor time that they used, all together."""

    async def look(self) -> bool:
        """Look now; return whether the processes have moved since their last move."""
        if (pid := self._pid) is None:
            return False
        # The log's size in the thread too: its disk may have stalled.
        (ticks, busy), size = await asyncio.to_thread(lambda: (processor_use(pid), self._log_size()))
        if self._first is None:
            self._first = self._marked = ticks
            self._size = size
        moved = busy or size != self._size or abs(ticks - self._marked) >= self._least
        if moved:
            self._marked, self._size, self._moved_at = ticks, size, running_time.now()
        self.spent_s = max(self.spent_s, (ticks - self._first) / _TICKS_PER_S)
        return moved

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log is not None and self._log.exists() else 0

    @property
    def elapsed_s(self) -> float:
        return running_time.now() - self._began

    @property
    def idle_s(self) -> float:
        """Seconds since the last move; for a process on another machine, since the beginning."""
        return running_time.now() - self._moved_at


async def while_moving(
    work: Awaitable[T], process: int | Movement, stall_s: float | None = None, limit_s: float | None = None
) -> T:
    """Return the outcome of ``work``, which ``process`` (an id or a Movement) and the processes below it do.

    Raises:
        Stalled: the processes did not move for ``stall_s`` (:data:`STALL_S`), or the work took longer than ``limit_s``
            (:data:`LIMIT_S`); ``work`` is cancelled.
    """
    longest = STALL_S if stall_s is None else stall_s
    limit = LIMIT_S if limit_s is None else limit_s
    movement = Movement(process) if isinstance(process, int) else process
    doing = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([doing], timeout=POLL_S))[0]:
            if await movement.look():
                give_sign()
            if movement.idle_s > longest:
                raise Stalled(f"used no processor for {longest:g} s", moves=False)
            if movement.elapsed_s > limit:
                raise Stalled(f"was still at work after {limit:g} s", moves=True)
        return doing.result()
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)


def processor_use(root: int) -> tuple[int, bool]:
    """Return the clock ticks that a process and all processes below it have used (with children that they waited for),
    and whether one of these processes now runs, waits for a processor or waits for a disk.
    """
    ticks, busy = 0, False
    for pid in (root, *process_guard.descendants(root)):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            busy = busy or fields[0] in "RD"
            ticks += sum(map(int, fields[11:15]))
    return ticks, busy
