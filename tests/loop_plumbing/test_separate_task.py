"""Whose cancellation is it? What code raises in a task of its own is a value; what cancels the caller is not."""

import asyncio
import signal
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from loop_plumbing import separate_task
from loop_plumbing.separate_task import RaisedThere, in_separate_task, result_of


async def cancels_the_task_that_runs_it():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def cancels_and_returns():
    asyncio.current_task().cancel()
    return 3


async def fails_with(error):
    raise error


async def recurses():
    await recurses()


ERRORS = [
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
    StopAsyncIteration(),
    asyncio.CancelledError(),
    BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()]),
    TimeoutError(),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_whatever_is_raised_is_known_to_be_theirs(error):
    with pytest.raises(RaisedThere) as raised:
        await in_separate_task(lambda: fails_with(error))
    assert raised.value.error is error
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("work", [cancels_the_task_that_runs_it, cancels_and_returns])
async def test_who_cancels_its_own_task_cancels_nobody_else(work):
    with pytest.raises(RaisedThere) as raised:
        await in_separate_task(work)
    assert isinstance(raised.value.error, asyncio.CancelledError)
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize(
    ("work", "kind"), [(recurses, RecursionError), (lambda: 3, TypeError), (lambda: 1 / 0, ZeroDivisionError)]
)
async def test_what_is_no_coroutine_or_ends_nowhere_is_theirs_too(work, kind):
    with pytest.raises(RaisedThere) as raised:
        await in_separate_task(work)
    assert isinstance(raised.value.error, kind)


async def test_the_result_is_handed_on():
    assert await in_separate_task(lambda: asyncio.sleep(0, "seen")) == "seen"
    assert await in_separate_task(lambda: asyncio.sleep(0)) is None


async def test_who_is_cancelled_waits_for_the_work_to_end():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    task = asyncio.create_task(in_separate_task(work))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_deadline_of_the_callers_is_the_callers():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await in_separate_task(asyncio.Event().wait)


async def test_work_that_will_not_be_cancelled_is_left_behind(monkeypatch):
    monkeypatch.setattr(separate_task, "LEAVE_S", 0.01)
    begun, over = asyncio.Event(), asyncio.Event()

    async def stubborn():
        while not over.is_set():
            begun.set()
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(in_separate_task(stubborn))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    over.set()


async def test_a_plain_function_has_result_and_error_inside_a_loop():
    assert result_of(asyncio.sleep(0, "seen")) == "seen"
    with pytest.raises(MemoryError):
        result_of(fails_with(MemoryError()))


def until_it_waits(caller):
    while sys._current_frames()[caller].f_back.f_code is not Future.result.__code__:
        time.sleep(0)


async def test_who_is_interrupted_inside_a_loop_waits_for_the_work_to_end():
    ended, caller = threading.Event(), threading.get_ident()

    async def work():
        try:
            until_it_waits(caller)
            signal.pthread_kill(caller, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            result_of(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()
