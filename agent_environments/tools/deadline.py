"""Calls a user's function, sync or async, and waits no longer than its deadline.

A sync function runs in a thread of its own, so that it holds up no other episode. A thread cannot be ended from
outside: one that passes its deadline is left behind (as a daemon, so it does not keep the process), and what it worked
on must not be used again. An async function is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from agent_environments.breakage import Raised as Raised  # part of what `call` raises
from agent_environments.own_task import RaisedThere, in_own_task


class DeadlinePassed(Exception):
    """The call was not over in time; a sync function may still be running."""


async def call(function: Callable[..., Any], arguments: dict[str, Any], deadline_s: float) -> Any:
    """``function(**arguments)``, awaited if it is async.

    Raises:
        DeadlinePassed: it took longer than ``deadline_s``.
        Raised: anything at all that it raised, ``SystemExit``, ``KeyboardInterrupt`` and the cancellation of a task of
            its own included: what an agent makes a tool do must end neither the node nor an episode.
    """
    try:
        async with asyncio.timeout(deadline_s):
            if inspect.iscoroutinefunction(function):
                return await in_own_task(lambda: function(**arguments))
            result, error = await _in_thread(lambda: function(**arguments))
    except TimeoutError as error:
        raise DeadlinePassed(f"took longer than {deadline_s:g} s") from error
    except RaisedThere as raised:
        raise Raised.by(raised.error) from raised.error
    if error is not None:
        raise Raised.by(error) from error
    return result


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """What ``function`` returns and what it raises, from a thread that nobody joins."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True, name="tool").start()
    return future
