"""Bounds of time and memory for work on a stranger's program or file, such as one that unpacks to much more."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Iterator

_LOCK = threading.RLock()
"""Held by the one work that runs: the bound of memory is the whole process's."""


class TooMuch(ValueError):
    """The work took more time or memory than it may; the message says which."""


class _Late(BaseException):
    """Raised when the time is over, out of reach of ``except Exception``."""


@contextlib.contextmanager
def bounded(cpu_s: float, memory_bytes: int) -> Iterator[None]:
    """Bound the work in the block, in this thread; the blocks of several threads run one after the other.

    Args:
        cpu_s: processor time of the thread; an operation that Python cannot interrupt runs to its end.
        memory_bytes: memory of the whole process beyond its present memory.

    Raises:
        TooMuch: the work took more time or memory.
    """
    thread, over, late = threading.get_ident(), threading.Event(), threading.Event()
    clock = time.pthread_getcpuclockid(thread)
    until = time.clock_gettime(clock) + cpu_s

    def watch() -> None:
        while not over.wait(max(until - time.clock_gettime(clock), 0.01)):
            if time.clock_gettime(clock) >= until:
                late.set()
                return _raise_in(thread, _Late)

    watcher = threading.Thread(target=watch, daemon=True)
    try:
        with _LOCK:
            usual = resource.getrlimit(resource.RLIMIT_DATA)
            try:
                watcher.start()  # before the bound: its stack is memory, too
                try:
                    _lower(memory_bytes, *usual)
                    yield
                finally:
                    over.set()
                    watcher.join()
                    if late.is_set():
                        _take_back(thread)
            finally:  # _Late is raised at most once, in the lines before
                resource.setrlimit(resource.RLIMIT_DATA, usual)
    except _Late:
        raise TooMuch(f"takes more than {cpu_s:g} s") from None
    except MemoryError:
        raise TooMuch(f"takes more than {memory_bytes >> 20:,} MiB of memory") from None


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Make a thread raise ``kind`` at its next step in Python; replaces an exception that is pending there."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _take_back(thread: int) -> None:
    """Leave no pending exception in this thread, by raising and catching one more. Clearing it with None makes CPython
    3.11 look for exceptions before every later step of the process, and a debugger's first step never ends."""
    with contextlib.suppress(_Late):
        _raise_in(thread, _Late)
        while True:
            pass


def _lower(memory_bytes: int, soft: int, hard: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[5]) * resource.getpagesize() + memory_bytes
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
