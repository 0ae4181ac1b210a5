"""What the machine does in the middle of many episodes on the real engine: no reward of 0, none lost, all counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_environments.losses import LOSSES_PER_COMMAND, Loss
from agent_environments.process_guard import descendants
from agent_environments.protocol import Grade
from support.adapter_support import fenced, honest_code, make_pool, needs_world, volume_task
from support.processes import episode_processes
from support.waiting import wait_until

pytestmark = [pytest.mark.integration, needs_world, pytest.mark.timeout(900)]

EPISODES = 4
REMEMBER = "remembered = 1"


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Any]:
    pool = make_pool(max_worlds=EPISODES + 1, **options)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


async def grades(pool: Any, fault: Callable[[], Awaitable[None]], step: str | None = None) -> list[Grade]:
    """Of episodes that solve their task, and meet the fault when each has run one program."""
    card, volume = volume_task()
    begun = 0

    async def episode(number: int) -> Grade:
        nonlocal begun
        environment = await pool.acquire(f"episode-{number}")
        try:
            await environment.start(card.task_id)
            await environment.step(fenced(REMEMBER))
            begun += 1
            await all_begun.wait()
            await environment.step(fenced(step or honest_code(card, volume)))
            return await environment.grade()
        finally:
            await environment.close()

    all_begun = asyncio.Event()
    episodes = asyncio.gather(*(episode(number) for number in range(EPISODES)))
    await wait_until(lambda: begun == EPISODES or episodes.done())
    await fault()
    all_begun.set()
    return await episodes


async def nothing() -> None:
    """No fault."""


async def test_worlds_killed_for_want_of_memory_cost_nothing():
    async with opened() as pool:

        async def kill() -> None:
            for pid in episode_processes(pool.world_server.pid):
                os.kill(pid, signal.SIGKILL)

        assert [grade.reward for grade in await grades(pool, kill)] == [1.0] * EPISODES
        assert pool.status().losses == {Loss.KILLED: EPISODES}
        assert pool.status().details["replays"] == EPISODES


async def test_servers_killed_cost_nothing():
    async with opened() as pool:

        async def kill() -> None:
            for server in pool._servers.values():
                for pid in [server.pid, *descendants(server.pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        assert [grade.reward for grade in await grades(pool, kill)] == [1.0] * EPISODES
        assert set(pool.status().losses) <= {Loss.REFUSED, Loss.KILLED}


async def test_graders_killed_cost_nothing(monkeypatch):
    async with opened() as pool:
        kills = Counter()
        once = pool._child

        async def killed(role: str) -> Any:
            connection = await once(role)
            if role == "grader" and kills["grader"] < LOSSES_PER_COMMAND - 1:
                kills["grader"] += 1
                os.kill(connection.pid, signal.SIGKILL)
            return connection

        monkeypatch.setattr(pool, "_child", killed)
        assert [grade.reward for grade in await grades(pool, nothing)] == [1.0] * EPISODES
        assert pool.status().losses == {Loss.KILLED: LOSSES_PER_COMMAND - 1}


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all the room that is left."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


async def test_a_full_disk_costs_nothing(small_disk):
    async with opened(experiments_root=str(small_disk)) as pool:
        ballast = small_disk / "ballast"
        emptying = []

        async def empty() -> None:
            counts = pool.losses.counts
            await wait_until(lambda: sum(counts.values()) > 2 * EPISODES)
            ballast.unlink()

        async def fill_up() -> None:
            fill(ballast)
            emptying.append(asyncio.create_task(empty()))

        found = await grades(pool, fill_up)
        await emptying[0]
        assert [grade.reward for grade in found] == [1.0] * EPISODES, found
        assert pool.status().losses[Loss.NO_ROOM] >= 1


async def test_a_program_that_ends_its_world_each_time_is_worth_no_more_than_nothing():
    async with opened() as pool:
        found = await grades(pool, nothing, step="import os\nos.abort()")
        assert not any(grade.success for grade in found)
        assert pool.status().details["replays"] == 0
