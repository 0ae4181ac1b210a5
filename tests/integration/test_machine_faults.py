"""What the machine does in the middle of many episodes on the real engine: no reward of 0, none lost, all counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_environments.lost_worlds import LOSSES_PER_COMMAND, Loss
from agent_environments.protocol import Grade
from loop_plumbing.process_guard import descendants
from support.adapter_support import fenced, honest_code, make_pool, needs_world, volume_task
from support.episodes import begun_episode
from support.processes import episode_processes
from support.waiting import wait_until

pytestmark = [pytest.mark.integration, needs_world, pytest.mark.timeout(900)]

session_loop = pytest.mark.asyncio(loop_scope="session")

EPISODES = 4
REMEMBER = "remembered = 1"
RECALL = "assert remembered == 1"


@pytest.fixture
def counted(pool):
    """The shared pool, with counts of its own."""
    pool.losses.counts.clear()
    pool.replays = 0
    for server in pool._servers.values():
        server.restarts = 0
    return pool


async def grades(pool: Any, fault: Callable[[], Awaitable[None]], step: str | None = None) -> list[Grade]:
    """Of episodes that solve their task, and meet the fault when each has run one program."""
    card, volume = volume_task()
    begun = 0

    async def episode(number: int) -> Grade:
        nonlocal begun
        async with begun_episode(pool, card.task_id) as environment:
            await environment.step(fenced(REMEMBER))
            begun += 1
            await all_begun.wait()
            await environment.step(fenced(step or f"{RECALL}\n{honest_code(card, volume)}"))
            return await environment.grade()

    all_begun = asyncio.Event()
    episodes = asyncio.gather(*(episode(number) for number in range(EPISODES)))
    await wait_until(lambda: begun == EPISODES or episodes.done())
    await fault()
    all_begun.set()
    return await episodes


async def nothing() -> None:
    """No fault."""


@session_loop
async def test_worlds_killed_for_want_of_memory_cost_nothing(counted):
    async def kill() -> None:
        for pid in episode_processes(counted._servers["world"].pid):
            os.kill(pid, signal.SIGKILL)

    assert [grade.reward for grade in await grades(counted, kill)] == [1.0] * EPISODES
    assert counted.status().losses.keys() <= {Loss.KILLED}
    assert counted.replays == EPISODES


@session_loop
async def test_servers_killed_cost_nothing(counted):
    async def kill() -> None:
        for server in counted._servers.values():
            for pid in [server.pid, *descendants(server.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    assert [grade.reward for grade in await grades(counted, kill)] == [1.0] * EPISODES
    assert counted.status().losses.keys() <= {Loss.REFUSED, Loss.KILLED}
    assert counted.status().restarts >= 2


@session_loop
async def test_graders_killed_cost_nothing(counted, monkeypatch):
    child, kills = counted._child, 0

    async def killed(role: str) -> Any:
        nonlocal kills
        connection = await child(role)
        if role == "grader" and kills < LOSSES_PER_COMMAND - 1:
            kills += 1
            os.kill(connection.pid, signal.SIGKILL)
        return connection

    monkeypatch.setattr(counted, "_child", killed)
    assert [grade.reward for grade in await grades(counted, nothing)] == [1.0] * EPISODES
    assert counted.status().losses == {Loss.KILLED: LOSSES_PER_COMMAND - 1}


@session_loop
async def test_a_program_that_ends_its_world_each_time_is_worth_no_more_than_nothing(counted):
    found = await grades(counted, nothing, step="import os\nos.abort()")
    assert not any(grade.success for grade in found)
    assert (counted.replays, counted.status().losses) == (0, {})


@pytest.fixture
def small_disk():
    folder = Path(tempfile.mkdtemp(prefix="disk-"))  # short, for the sockets in it
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        folder.rmdir()
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


def fill(path: Path) -> None:
    """Take all the room that is left."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


@pytest.mark.drill
@session_loop
async def test_a_full_disk_costs_nothing(small_disk):
    pool = make_pool(max_worlds=EPISODES, experiments_root=str(small_disk))
    await pool.open()
    ballast = small_disk / "ballast"
    emptying: list[asyncio.Task[None]] = []

    async def empty() -> None:
        await wait_until(lambda: sum(pool.losses.counts.values()) > 2 * EPISODES)
        ballast.unlink()

    async def fill_up() -> None:
        fill(ballast)
        emptying.append(asyncio.create_task(empty()))

    try:
        found = await grades(pool, fill_up)
        await emptying[0]
    finally:
        await pool.close()
    assert [grade.reward for grade in found] == [1.0] * EPISODES, found
    assert pool.status().losses[Loss.NO_ROOM] >= 1
