"""A command that ends, that does not, and what it leaves behind."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from agent_environments.harness.program import run_program
from support.waiting import DEADLINE_S, wait_until


def lives(pid):
    return Path(f"/proc/{pid}").exists()


def python(code):
    return [sys.executable, "-c", code]


async def test_a_program_has_its_variables_and_no_secrets_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    ended = await run_program(
        python(
            "import os; print(sorted(n for n in os.environ if n in ('TASK_ID', 'ROLLOUT_SERVER_TOKEN')), os.getcwd())"
        ),
        {"TASK_ID": "t_1"},
        tmp_path,
    )
    assert (ended.status, ended.output) == (0, f"['TASK_ID'] {tmp_path}\n")


async def test_the_end_of_a_long_output_is_kept(tmp_path):
    ended = await run_program(python("print('x' * 1_000_000); print('the end'); raise SystemExit(3)"), {}, tmp_path)
    assert ended.status == 3
    assert ended.output.endswith("the end\n")
    assert len(ended.output) < 5000


async def test_a_program_that_never_ends_is_ended_with_all_that_it_started(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, time; os.setsid(); open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    running = asyncio.create_task(run_program(python(code), {}, tmp_path))
    await wait_until(lambda: file.exists() and file.read_text())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not lives(file.read_text())


async def test_a_program_that_kills_its_guard_and_leaves_a_process_is_not_waited_for(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, time; os.setsid(); open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        f"import os, pathlib, signal, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pid = pathlib.Path({str(file)!r})\n"
        "while not (pid.exists() and pid.read_text()): time.sleep(0.01)\n"
        "print('bye', flush=True); os.kill(os.getppid(), signal.SIGKILL)"
    )
    try:
        ended = await asyncio.wait_for(run_program(python(code), {}, tmp_path), DEADLINE_S)
    finally:
        if file.exists() and lives(file.read_text()):
            os.kill(int(file.read_text()), signal.SIGKILL)
    assert (ended.status, ended.output) == (-signal.SIGKILL, "bye\n")


async def test_a_time_limit(tmp_path):
    assert (await run_program(python("import time; time.sleep(600)"), {}, tmp_path, 0.5)).status is None


async def test_a_command_that_is_not_there_says_so(tmp_path):
    ended = await run_program(["/nowhere/agent"], {}, tmp_path)
    assert ended.status == 127
    assert "cannot start /nowhere/agent" in ended.output
