"""Calls a user's function in the main thread of a tool process, for no longer than its deadline.

At the deadline an alarm raises in the middle of the function, be it in a loop, asleep or within a regular expression.
A call that cannot be interrupted so (one operation of a library that ignores signals, code that catches everything) is
ended from outside, with its process (:mod:`loop_plumbing.forked_process`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import FrameType
from typing import Any

from loop_plumbing.breakage import Raised as Raised  # `call` raises it
from loop_plumbing.fork_server import DeadlinePassed as DeadlinePassed
from loop_plumbing.running_time import TICK_S, event_loop, now


class _Alarm(BaseException):
    """Raised by the alarm, out of reach of ``except Exception``."""


class _State:
    """The state of the current call; only one call is made at a time."""

    running = False
    late = False
    pauses = 0
    left = 0.0
    end = 0.0
    """The time at which the call's deadline passes, by the clock of :mod:`loop_plumbing.running_time`."""


def install() -> None:
    """Let SIGALRM, whoever sends the signal, end the current call; without a call the signal does nothing."""
    signal.signal(signal.SIGALRM, _raise)


def call(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    deadline_s: float,
    through: tuple[type[Exception], ...] = (),
) -> Any:
    """Return ``function(**arguments)``, awaited if async. Only in the main thread and after :func:`install`.

    Raises:
        through: exceptions of these types pass through as they are.
        DeadlinePassed: the call took longer than ``deadline_s``, or SIGALRM ended it before.
        Raised: the function raised anything else, including ``SystemExit``, ``KeyboardInterrupt`` and the cancellation
            of its own task.
    """
    _State.late, _State.pauses = False, 0
    try:
        try:
            _State.running = True
            _arm(deadline_s)
            result = function(**arguments)
            if inspect.iscoroutine(result):
                result = _await(result)
        finally:
            _State.running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        if not _State.late:
            if isinstance(error, through):
                raise
            raise Raised.by(error) from error
    if _State.late:
        raise DeadlinePassed(f"took longer than {deadline_s:g} s")
    return result


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Stop the time of the current call within the block; overlapping blocks count once."""
    if not _State.pauses:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _State.left = _State.end - now()
    _State.pauses += 1
    try:
        yield
    finally:
        _State.pauses -= 1
        if not _State.pauses and _State.running and _State.left > 0.0:
            _arm(_State.left)


def _arm(seconds: float) -> None:
    _State.end = now() + seconds
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _raise(number: int, frame: FrameType | None) -> None:
    if not _State.running:
        return
    left = _State.end - now()
    if left > 0.0 and not _State.pauses and not signal.getitimer(signal.ITIMER_REAL)[0]:  # the kernel's timer went on
        return _arm(max(left, TICK_S))
    _State.late = True
    raise _Alarm


_loop = functools.cache(event_loop)
"""The event loop of all calls: a session that a module opens in one of them lives on in the next."""


def _await(work: Coroutine[Any, Any, Any]) -> Any:
    task = _loop().create_task(work)
    try:
        return _loop().run_until_complete(task)
    except _Alarm:
        import asyncio

        task.cancel()
        _loop().run_until_complete(asyncio.wait([task]))
        raise
