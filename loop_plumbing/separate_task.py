"""Awaits somebody else's code in a task of its own, so that its cancellation and the caller's are told apart.

An environment's method or a tool may raise anything: ``SystemExit``, ``GeneratorExit``, the cancellation of the task
that runs it, which it may even have asked for itself. Raised in the task of an episode, these look like the end of that
episode. Out of a task of its own they are values like any other error, and a cancellation that is raised *here* is
meant for the caller.

:func:`result_of` is for plain functions, which a notebook may call: its cells run inside an event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from loop_plumbing import running_time

logger = logging.getLogger(__name__)

LEAVE_S = 60.0
"""Seconds that the code has to end once it is cancelled; then it is left behind."""

T = TypeVar("T")


class RaisedThere(Exception):
    """An awaited task raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(type(error).__name__)
        self.error = error


async def in_separate_task(work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``await work()``.

    Raises:
        RaisedThere: the work raised any exception, or its task was cancelled.
        CancelledError: the caller was cancelled. The work was cancelled too, and given :data:`LEAVE_S` to end.
    """
    task = asyncio.create_task(_caught(work))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        if (await asyncio.wait([task], timeout=LEAVE_S))[1]:
            logger.error("%r goes on though it was cancelled %g s ago: it is left behind", work, LEAVE_S)
        raise
    if task.cancelled():
        raise RaisedThere(asyncio.CancelledError("it cancelled the task that ran it"))
    results, error = task.result()
    if error is not None:
        raise RaisedThere(error) from error
    return results[0]


async def _caught(work: Callable[[], Awaitable[T]]) -> tuple[list[T], BaseException | None]:
    """Return the result or the exception; the task must not raise, because SystemExit would end its event loop."""
    try:
        return [await work()], None
    except BaseException as error:
        return [], error


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, as ``asyncio.run`` does. If this thread already runs an event loop, this loop
    stands still, and the work runs in another loop in a thread of its own.

    Raises:
        KeyboardInterrupt: this process was interrupted; the work was cancelled, and has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return running_time.run(work)
    cancel: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        cancel.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await task

    with ThreadPoolExecutor(1) as threads:
        try:
            return threads.submit(running_time.run, cancellable()).result()
        except KeyboardInterrupt:
            cancel.result()()
            raise
