"""The time in which a job's processes could run: it stands while they are suspended, paused or frozen.

The clocks of the system go on then, and a deadline that reads one would pass too early. So deadlines whose passing
costs something read :func:`now`. One process of a job ticks, in a thread. Time beyond :data:`LONGEST_S` between two
ticks is time in which nothing ran. The processes that are forked for it read its count on a page that they may not
write.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # a process without asyncio is forked in less time
    import asyncio

TICK_S, LONGEST_S = 0.1, 0.5
_COUNTED = struct.Struct("dd")
"""The seconds that do not count, and the time of the last tick."""
T = TypeVar("T")


class _Clock:
    page: mmap.mmap | None = None


def now() -> float:
    """Return the seconds of a clock that stops while nothing runs; ``time.monotonic()`` if no process ticks."""
    clock = time.monotonic()
    if _Clock.page is None:
        return clock
    lost, ticked = _COUNTED.unpack_from(_Clock.page)
    return float(min(clock, ticked + LONGEST_S) - lost)


@functools.cache
def tick() -> int:
    """Let this process drive the clock from now on; return the file descriptor that :func:`follow` takes."""
    written = os.memfd_create("running time")
    os.ftruncate(written, _COUNTED.size)
    page = mmap.mmap(written, _COUNTED.size)
    page[:] = _COUNTED.pack(0.0, time.monotonic())
    _Clock.page = page
    threading.Thread(target=_tick, args=(page,), name="running time", daemon=True).start()
    readable = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)
    os.close(written)
    return readable


def _tick(page: mmap.mmap) -> None:
    while True:
        (lost, ticked), clock = _COUNTED.unpack(page), time.monotonic()
        page[:] = _COUNTED.pack(lost + max(0.0, clock - ticked - LONGEST_S), clock)
        time.sleep(TICK_S)


def follow(descriptor: int) -> None:
    """Use the clock of the process whose :func:`tick` returned this file descriptor; closes the descriptor."""
    _Clock.page = mmap.mmap(descriptor, _COUNTED.size, prot=mmap.PROT_READ)
    os.close(descriptor)


def event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop whose timeouts use :func:`now`."""
    import asyncio

    loop = asyncio.new_event_loop()
    loop.time = now  # type: ignore[method-assign]
    return loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` as ``asyncio.run`` does, with timeouts that use :func:`now`; this process drives the clock."""
    import asyncio

    tick()
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(work)
