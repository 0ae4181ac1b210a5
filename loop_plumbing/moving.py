"""Waiting for a process that may be slow: for as long as it, or a process below it, uses or wants its processor.

Who waits in turn for this process needs a sign of life of it, and cannot see those below it: :func:`signs` counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import TypeVar

from loop_plumbing import process_guard

POLL_S = 1.0
STALL_S = 120.0
"""What has work to do, and for so long neither computes nor waits for a processor or a disk, hangs."""
LIMIT_S = 3600.0
"""Last resort: for what computes for ever."""

T = TypeVar("T")


class _Signs:
    count = 0


def signs() -> int:
    """How often this process has seen something move, or be ready, that it waits for."""
    return _Signs.count


def give_sign() -> None:
    """Count something that moved."""
    _Signs.count += 1


class Stalled(TimeoutError):
    """The error of a wait that ended in vain; the message says whether its processes hung or only took too long."""


async def while_moving(work: Awaitable[T], pid: int, stall_s: float | None = None) -> T:
    """The outcome of ``work``, which the process ``pid`` and those below it do.

    Raises:
        Stalled: they have not moved for ``stall_s`` (:data:`STALL_S`), or it took :data:`LIMIT_S`; ``work`` is
            cancelled.
    """
    longest = STALL_S if stall_s is None else stall_s
    doing = asyncio.ensure_future(work)
    began = moved_at = time.monotonic()
    used: int | None = None
    try:
        while not (await asyncio.wait([doing], timeout=POLL_S))[0]:
            before = used
            used, busy = await asyncio.to_thread(processor_use, pid)
            now = time.monotonic()
            if busy or used != before:
                moved_at = now
                give_sign()
            if now - moved_at > longest:
                raise Stalled(f"used no processor for {longest:g} s")
            if now - began > LIMIT_S:
                raise Stalled(f"was still at work after {LIMIT_S:g} s")
        return doing.result()
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)


def processor_use(root: int) -> tuple[int, bool]:
    """Clock ticks that a process and those below it have used, children that they waited for included; and whether one
    of them runs, waits for a processor, or waits for a disk at this moment.
    """
    ticks, busy = 0, False
    for pid in (root, *process_guard.descendants(root)):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            busy = busy or fields[0] in "RD"
            ticks += sum(map(int, fields[11:15]))
    return ticks, busy
