"""What a process that does not answer does meanwhile."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from rollout_server.inference.server_movement import Movement
from support.waiting import wait_until


@contextlib.contextmanager
def process(program):
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def test_a_process_that_computes_moves_and_one_that_is_stopped_does_not(tmp_path):
    with process("while True: pass") as child:
        movement = Movement(child.pid, tmp_path / "no log yet")
        await movement.look()

        async def spent() -> float:
            await movement.look()
            return movement.spent_s

        while await spent() < 0.3:
            pass
        assert movement.idle_s < movement.elapsed_s
        os.kill(child.pid, signal.SIGSTOP)
        while await movement.look():
            pass
        idle = movement.idle_s
        await wait_until(lambda: movement.idle_s > idle)
        assert not await movement.look()


async def test_a_log_that_grows_is_a_move_and_what_is_elsewhere_is_not_seen(tmp_path):
    log = tmp_path / "log"
    with process("input()") as child:
        movement = Movement(child.pid, log)
        os.kill(child.pid, signal.SIGSTOP)
        while await movement.look():
            pass
        log.write_text("loading weights: 10 %\n")
        assert await movement.look()
        assert not await movement.look()
    elsewhere = Movement(None, None)
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
    with process("input()") as child:
        monkeypatch.setattr(Path, "stat", noted)
        await Movement(child.pid, log).look()
    assert threads
    assert threading.get_ident() not in threads
