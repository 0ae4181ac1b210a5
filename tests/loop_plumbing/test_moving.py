"""A process that computes, or writes into its log, is waited for; one that sleeps or is stopped is not."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loop_plumbing import moving
from loop_plumbing.moving import Movement, Stalled, processor_use, while_moving
from support.waiting import DEADLINE_S, wait_until

STALL_S = 1.0
SPINS = "while True: pass"
SLEEPS = "import time; time.sleep(3600)"
CHILD_SPINS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"


@contextlib.contextmanager
def process(program):
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        yield child.pid
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(moving, "POLL_S", 0.05)


async def forever():
    await asyncio.Event().wait()


async def test_an_answer_is_passed_on_and_a_failure_too():
    assert await while_moving(asyncio.sleep(0, "answer"), os.getpid()) == "answer"

    async def fails():
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        await while_moving(fails(), os.getpid())


@pytest.mark.parametrize("program", [SPINS, CHILD_SPINS], ids=["itself", "a child of it"])
async def test_what_computes_is_waited_for_and_what_is_stopped_is_not(program):
    with process(program) as pid:
        waiting = asyncio.create_task(while_moving(forever(), pid, STALL_S))
        await asyncio.sleep(3 * STALL_S)
        assert not waiting.done()
        os.killpg(pid, signal.SIGSTOP)
        with pytest.raises(Stalled, match=f"used no processor for {STALL_S:g} s"):
            await waiting


async def test_what_waits_for_nothing_hangs():
    with process(SLEEPS) as pid, pytest.raises(Stalled, match="used no processor"):
        await while_moving(forever(), pid, STALL_S)


async def test_what_computes_for_ever_meets_the_limit(monkeypatch):
    monkeypatch.setattr(moving, "LIMIT_S", 0.2)
    with process(SPINS) as pid, pytest.raises(Stalled, match=r"still at work after 0\.2 s"):
        await while_moving(forever(), pid, DEADLINE_S)


async def test_who_gives_up_waiting_ends_the_wait_for_the_answer():
    ended = asyncio.Event()

    async def answer():
        try:
            await forever()
        finally:
            ended.set()

    task = asyncio.create_task(while_moving(answer(), os.getpid()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(ended.is_set)


def test_a_process_that_is_gone_uses_nothing():
    with process("pass") as pid:
        pass
    assert processor_use(pid) == (0, False)


async def test_a_log_that_grows_is_a_move_and_what_is_elsewhere_is_not_seen(tmp_path):
    log = tmp_path / "log"
    with process(SLEEPS) as pid:
        movement = Movement(pid, log)
        os.kill(pid, signal.SIGSTOP)
        while await movement.look():
            pass
        log.write_text("loading weights: 10 %\n")
        assert await movement.look()
        assert not await movement.look()
    elsewhere = Movement(None)
    assert not await elsewhere.look()
    assert elsewhere.spent_s == 0


async def test_a_stalled_file_system_stalls_no_event_loop(tmp_path, monkeypatch):
    """A server whose log cannot be written does not answer, and is looked at: with its log."""
    log, stat, threads = tmp_path / "log", Path.stat, []

    def noted(path, **options):
        if path == log:
            threads.append(threading.get_ident())
        return stat(path, **options)

    log.touch()
    with process(SLEEPS) as pid:
        monkeypatch.setattr(Path, "stat", noted)
        await Movement(pid, log).look()
    assert threads
    assert threading.get_ident() not in threads


async def test_what_only_looks_now_and_then_whether_something_has_come_does_not_move(monkeypatch):
    ticks = os.sysconf("SC_CLK_TCK")
    for least_s, moves in ((0.0, [False, True, True, True]), (1.0, [False, False, True, False])):
        uses = iter([(0, False), (ticks // 2, False), (ticks, False), (ticks + 1, False)])
        monkeypatch.setattr(moving, "processor_use", lambda pid, uses=uses: next(uses))
        movement = Movement(1, least_s=least_s)
        assert [await movement.look() for _ in moves] == moves
