"""Awaits somebody else's code in a task of its own, so that who cancelled what is known and need not be guessed.

An environment's method or a tool may raise anything: ``SystemExit``, ``GeneratorExit``, the cancellation of the task
that runs it, which it may even have asked for itself. Raised in the task of an episode, these cannot be told from the
end of that episode. Out of a task of its own they are values like any other error, and what is raised *here* as a
cancellation is meant for the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

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
    """The result of ``await work()``.

    Raises:
        RaisedThere: anything at all that it raised, the cancellation of its task included.
        CancelledError: the caller was cancelled; so was the work, and it has ended, or had :data:`LEAVE_S` to.
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
    """The result, or what was raised: a task that ends in SystemExit ends its event loop."""
    try:
        return [await work()], None
    except BaseException as error:
        return [], error
