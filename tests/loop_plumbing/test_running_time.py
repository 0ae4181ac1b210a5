"""A job whose processes are all stopped for a while, and then go on: nothing is late for that."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loop_plumbing import process_guard
from support.texts import texts_beside

TABLES = texts_beside(__file__)

ROOT = Path(__file__).parents[2]
STOPPED_S = 7.0
TOOLS = TABLES["tools"]
PROGRAM = TABLES["program"]


def stop_for(root, seconds):
    """Stop a process and all below it for so long, as a batch system does with a job; then have them go on."""
    processes = [root, *process_guard.descendants(root)]
    for what, pause_s in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):  # it had ended before
                os.kill(pid, what)
        time.sleep(pause_s)


@pytest.mark.slow
@pytest.mark.fault("a suspended job has its tools, agents and servers told that they took too long")
def test_nothing_is_late_for_the_time_in_which_all_was_stopped(tmp_path):
    (tmp_path / "my_tools.py").write_text(TOOLS)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", PROGRAM, tmp_path / "my_tools.py"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as program:
        try:
            assert program.stdout.readline() == "begun\n"
            stop_for(program.pid, STOPPED_S)
            late = json.loads(program.stdout.readline())
        finally:
            program.kill()
    assert list(late) == ["hangs"], late
    assert "took longer than 6 s" in late["hangs"]
