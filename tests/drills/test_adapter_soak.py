"""500 episodes while worlds, grader and fork servers are killed at random, and worlds stopped: none is lost. A drill.

make drills K=adapter_soak
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from agent_environments.protocol import EnvironmentFault
from appworld_adapter.pool.episode import PROGRAM_BROKE
from support.adapter_support import make_pool, needs_world, no_op_reward, play, solution_steps
from support.episodes import open_pool
from support.processes import episode_processes, processes

pytestmark = [pytest.mark.integration, pytest.mark.drill, needs_world, pytest.mark.timeout(3600)]

EPISODES = 500
AT_ONCE = 8
ATTEMPTS_BETWEEN_KILLS = 1.2
"""Attempts that end, on average. Kills by the clock alone would leave a slow machine no time to bring a server back."""
VICTIMS = {"world or interpreter": 0.8, "grader": 0.1, "world server": 0.1}
STOPPED = 0.1
"""Share of the worlds and interpreters that are stopped instead of killed; these hang until their time is up."""
EXECUTE_TIMEOUT_S = 15.0
NAMED_REASONS = {"environment_crashed", "environment_timeout"}
ATTEMPTS = 5


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry).split(":")[0])
    return found


def left_behind(folder: str) -> list[str]:
    return [*processes(folder).values(), *map(str, Path(folder).parent.glob("run-*"))]


async def kill_at_random(pool, rng, ended: asyncio.Semaphore, killed: Counter) -> None:
    due = 0.0
    while True:
        due += rng.expovariate(1 / ATTEMPTS_BETWEEN_KILLS)
        while due >= 1:
            await ended.acquire()
            due -= 1
        await asyncio.sleep(rng.random())  # not always between two episodes
        (victim,) = rng.choices(list(VICTIMS), list(VICTIMS.values()))
        server = pool._servers["grader" if victim == "grader" else "world"]
        if not server.alive:
            continue
        candidates = episode_processes(server.pid) if victim == "world or interpreter" else [server.pid]
        stop = victim == "world or interpreter" and rng.random() < STOPPED
        if candidates:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(candidates), signal.SIGSTOP if stop else signal.SIGKILL)
                killed["stopped" if stop else victim] += 1


async def test_nothing_is_lost_and_nothing_is_left(tmp_path_factory):
    rng = random.Random(0)
    base = tmp_path_factory.mktemp("soak")
    async with open_pool(
        make_pool(max_worlds=AT_ONCE, execute_timeout_s=EXECUTE_TIMEOUT_S, experiments_root=str(base))
    ) as pool:
        tasks = pool.tasks("train")
        killed: Counter = Counter()
        outcomes: Counter = Counter()
        memory: list[float] = []
        descriptors: list[int] = []

        ended = asyncio.Semaphore(0)

        async def episode(number: int) -> None:
            task = tasks[number % len(tasks)]
            steps = solution_steps(task) if number % 2 else []
            for _ in range(ATTEMPTS):
                try:
                    results, grade = await play(pool, task, steps)
                except EnvironmentFault as error:
                    outcomes[error.reason] += 1
                    continue
                finally:
                    ended.release()
                outcomes["finished"] += 1
                if results and PROGRAM_BROKE in results[-1].observation:
                    outcomes["interpreter killed"] += 1  # graded as it stood: for all we know the agent did it
                    return
                # A world that was brought back is the world that died: the verdict is what it would have been.
                assert grade.success == bool(steps), task
                assert grade.reward == (1.0 if steps else no_op_reward(task)), task
                return
            outcomes["given up"] += 1

        async def worker(numbers) -> None:
            for number in numbers:
                await episode(number)
                if number % 50 == 49:
                    memory.append(resident_mb())
                    descriptors.append(len(open_descriptors()))

        began = time.monotonic()
        killer = asyncio.create_task(kill_at_random(pool, rng, ended, killed))
        numbers = iter(range(EPISODES))
        try:
            await asyncio.gather(*(worker(numbers) for _ in range(AT_ONCE)))
        finally:
            killer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killer
        seconds = time.monotonic() - began
        status = pool.status()
        folder = str(pool.run_folder.path)
        left_in_outputs = list((pool.run_folder.agent / "experiments" / "outputs").iterdir())

    print(f"\n{EPISODES} episodes in {seconds:.0f} s; killed {dict(killed)}; outcomes {dict(outcomes)}; {status}")
    print(f"memory of the parent, MiB: {[round(value, 1) for value in memory]}; descriptors: {descriptors}")
    assert outcomes["finished"] == EPISODES
    assert set(outcomes) <= {"finished", "interpreter killed", *NAMED_REASONS}
    assert killed["world or interpreter"] >= 20
    assert killed["stopped"] >= 3
    assert killed["grader"] >= 1
    assert killed["world server"] >= 1
    assert status.open_worlds == status.waiting == 0
    assert left_in_outputs == []
    assert left_behind(folder) == []
    half = len(memory) // 2
    assert memory[-1] < memory[half] + 8, "the parent's memory is flat"
    assert max(descriptors[half:]) <= max(descriptors[:half]) + AT_ONCE
