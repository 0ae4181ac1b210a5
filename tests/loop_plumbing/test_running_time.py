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

ROOT = Path(__file__).parents[2]
STOPPED_S = 7.0
TOOLS = """
import asyncio, os, pathlib, time
from agent_environments.tools import reward, tool

TASKS = {"train": [{"id": "one_1", "question": "?"}]}
FOLDER = pathlib.Path(__file__).parent


def work(slices=20):
    (FOLDER / f"begun-{os.getpid()}").touch()
    while len(list(FOLDER.glob("begun-*"))) < 4:
        time.sleep(0.01)
    for _ in range(slices):
        time.sleep(0.1)
    return "worked"


@tool(deadline_s=6.0)
def plain() -> str:
    "Work."
    return work()


@tool(deadline_s=6.0)
async def awaited() -> str:
    "Work."
    async with asyncio.timeout(6.0):
        for _ in range(20):
            await asyncio.sleep(0.1)
    return work(1)


@tool(deadline_s=6.0)
def hangs() -> str:
    "Work."
    return work(slices=10**6)


@reward(deadline_s=6.0)
def one() -> float:
    return float(work() == "worked")
"""
PROGRAM = """
import asyncio, json, pathlib, sys

from agent_environments.harness.program import run_program
from agent_environments.lost_worlds import Loss, Losses, Recovery, WorldLost
from agent_environments.tools.environment import ToolPool
from loop_plumbing import running_time
from loop_plumbing.agent_timeout import AgentTimeout
from loop_plumbing.moving import while_moving
from rollout_server.client import RolloutClient
from support.adapter_support import word_spans
from support.tool_modules import call

CLIENT = RolloutClient("http://localhost:1", "")
CALLED = ("plain", "awaited", "hangs", "reward")
LIMIT_S = 6.0


async def rest(seconds=1.0):
    for _ in range(10):
        await asyncio.sleep(seconds / 10)


async def timeout():
    async with asyncio.timeout(LIMIT_S):
        await rest()


async def agent():
    async with AgentTimeout(LIMIT_S).running():
        await rest()


async def still_process():
    sleeps = await asyncio.create_subprocess_exec("sleep", "1")
    await while_moving(rest(1.5), sleeps.pid, LIMIT_S, LIMIT_S)


async def patience():
    losses = iter([0.0, 1.0])

    async def once():
        for seconds in losses:
            await rest(seconds)
            raise WorldLost("gone", Loss.GONE)

    await Recovery(Losses(), "episode", LIMIT_S).run(once)


async def node_is_away():
    wait = CLIENT.patience(LIMIT_S)
    await rest()
    wait(OSError())


async def program():
    assert (await run_program(["sleep", "1"], {}, ".", timeout_s=LIMIT_S)).status == 0


async def called(pool, name):
    environment = await pool.acquire("1")
    await environment.start("one_1")
    if name == "reward":
        assert (await environment.grade()).reward == 1.0
    else:
        said = (await environment.step(call(name))).observation
        assert "worked" in said, said
    await environment.close()


async def main():
    pool = ToolPool(word_spans, sys.argv[1], max_worlds=8)
    await pool.open()
    works = [asyncio.create_task(called(pool, name), name=name) for name in CALLED]
    while len(list(pathlib.Path().glob("begun-*"))) < len(CALLED):
        await asyncio.sleep(0.01)
    for work in (timeout, agent, still_process, patience, node_is_away, program):
        works.append(asyncio.create_task(work(), name=work.__name__))
    asyncio.get_running_loop().call_later(0.1, lambda: print("begun", flush=True))
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    await pool.close()
    print(json.dumps({work.get_name(): repr(error) for work, error in zip(works, outcomes) if error}))


running_time.run(main())
"""


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
