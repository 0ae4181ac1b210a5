"""Worlds in processes of a fork server, on a world of the standard library: what dies, hangs or lies."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_environments.conformance import HOSTILE_ACTIONS, check_conformance
from agent_environments.lost_worlds import LOSSES_PER_COMMAND, Losses
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, UnknownTask
from agent_environments.remote.line import LineStuck
from contrib_support.fake_world_pools import FAKE_WORLD, FakePool
from loop_contrib.worlds.pool import WorldKind
from loop_contrib.worlds.world_process import WorldProcess
from loop_plumbing import moving
from loop_plumbing.forked_process import ForkServer
from loop_plumbing.process_guard import descendants
from support.adapter_support import word_spans
from support.processes import parent_of, write_program
from support.texts import texts_beside
from support.waiting import block_until, wait_until

ROOT = Path(__file__).parents[4]


@pytest.fixture
async def make_pool():
    pools = []

    async def make(**options):
        pool = FakePool(word_spans, **{"python": sys.executable, "max_worlds": 4, **options})
        pools.append(pool)
        await pool.open()
        return pool

    before = set(descendants(os.getpid()))
    yield make
    for pool in pools:
        await pool.close()
    assert set(descendants(os.getpid())) <= before


async def started(pool, task="to_3"):
    environment = await pool.acquire("episode")
    messages = await environment.start(task)
    assert messages[-1].content == f"Bring 0 to {task.removeprefix('to_')}."
    return environment


async def say(environment, *commands):
    return [(await environment.step(f"Action: {command}")).observation for command in commands]


@pytest.mark.parametrize(("message", "command"), texts_beside(__file__)["the_command_of_a_message"])
def test_the_command_of_a_message(message, command):
    pool = FakePool(word_spans, python=sys.executable)
    assert pool.command(message) == (command or None)
    assert pool.command(pool.message("craft 1 stick")) == "craft 1 stick"


def world_of(environment):
    return environment._line.pid


async def test_an_episode(make_pool):
    pool = await make_pool()
    assert pool.tasks("train") == ["to_3", "to_5"]
    with pytest.raises(UnknownTask, match="train, dev"):
        pool.tasks("test")
    environment = await started(pool)
    with pytest.raises(UnknownTask):
        await environment.start("to_9")
    assert await say(environment, "add", "jump", "print") == ["1", "unknown", "1"]
    empty = await environment.step("")
    assert empty.empty_action
    assert (await environment.grade()).reward == pytest.approx(1 / 3)
    assert await pool.expert("to_3") == ["add"] * 3
    assert await say(environment, "add", "add") == ["2", "3"]
    assert (await environment.grade()).success
    with pytest.raises(EnvironmentCrashed):
        await environment.step("add")
    await environment.close()
    assert pool.status().open_worlds == 0


async def test_it_conforms(make_pool):
    pool = await make_pool(step_timeout_s=10.0)
    wrong = [f"Action: {command}" for command in ("die", "print", "garble", "fork")]
    await check_conformance(pool, "to_3", [*HOSTILE_ACTIONS, *wrong])


async def test_each_episode_has_a_world_of_its_own(make_pool):
    pool = await make_pool()
    environments = [await started(pool) for _ in range(4)]
    pids = {world_of(environment) for environment in environments}
    assert len(pids) == 4
    fifth = asyncio.create_task(pool.acquire("fifth"))
    await wait_until(lambda: pool.status().waiting == 1)
    await environments[0].close()
    environment = await fifth
    await environment.start("to_3")
    assert world_of(environment) not in pids
    assert await say(environment, "count") == ["1"], "what an episode counts is its own"
    await environment.close()


async def test_a_world_with_a_java_machine_plays_the_next_episode_too(make_pool, monkeypatch):
    monkeypatch.setattr(FakePool, "kind", WorldKind("fake", FAKE_WORLD, memory_mb=512, heap_mb=64))
    pool = await make_pool()
    worlds = []
    for _ in range(2):
        environment = await started(pool)
        worlds.append(world_of(environment))
        await environment.close()
    assert worlds[0] == worlds[1]


async def test_a_killed_world_is_replayed(make_pool):
    pool = await make_pool()
    first, second = await started(pool, "to_5"), await started(pool, "to_3")
    await say(first, "add", "add")
    await say(second, "add")
    world = world_of(first)
    os.kill(world, signal.SIGKILL)
    block_until(lambda: not Path(f"/proc/{world}").exists())
    assert await say(first, "add") == ["3"]
    assert await say(second, "add") == ["2"]
    assert pool.status().restarts >= 1
    assert (await second.grade()).reward == pytest.approx(2 / 3)


async def test_worlds_whose_server_is_killed_are_replayed(make_pool):
    pool = await make_pool()
    environments = [await started(pool, "to_5") for _ in range(2)]
    for environment in environments:
        await say(environment, "add")
    (server,) = {parent_of(world_of(environment)) for environment in environments}
    os.kill(server, signal.SIGKILL)
    block_until(lambda: not Path(f"/proc/{server}").exists())
    for environment in environments:
        assert await say(environment, "add") == ["2"]
        assert not (await environment.grade()).ungradable


async def test_a_killed_worker_is_told_from_one_that_ended(make_pool, tmp_path):
    pool = await make_pool()
    environment = await started(pool)
    marker = tmp_path / "go"
    step = asyncio.create_task(environment.step(f"wait-for {marker}"))
    await wait_until(Path(f"{marker}-is-awaited").exists)
    os.kill(world_of(environment), signal.SIGKILL)
    marker.touch()
    assert not (await step).done
    await environment.step("die")
    assert pool.status().losses == {"killed": 1, "ended": LOSSES_PER_COMMAND}


async def test_a_worlds_java_machine_that_is_killed_is_the_machines_doing(make_pool, tmp_path):
    """Its worker lives, and finds nobody to ask."""
    pool = await make_pool()
    environment = await started(pool)
    assert await say(environment, "add", f"lose-child {tmp_path / 'lost'}", "add") == ["1", "2", "3"]
    assert (await environment.grade()).success
    assert pool.status().losses == {"killed": 1}


async def test_others_are_not_charged_for_it(make_pool):
    """The neighbours of one who kills its worker again and again go on as if nothing had been."""
    pool = await make_pool()
    killer, neighbour = await started(pool), await started(pool)
    await say(neighbour, "add")
    await killer.step("die")
    assert await say(neighbour, "add", "add") == ["2", "3"]
    assert (await neighbour.grade()).success
    assert f"{LOSSES_PER_COMMAND} worlds were lost" in (await killer.grade()).ungradable


async def test_a_step_that_hangs_is_cut_short_and_ungradable(make_pool):
    pool = await make_pool(step_timeout_s=0.5)
    environment = await started(pool)
    with pytest.raises(EnvironmentTimeout):
        await environment.step("hang")
    assert "cut short" in (await environment.grade()).ungradable


@pytest.fixture
async def worker(monkeypatch):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    server = ForkServer("fake", [sys.executable, str(FAKE_WORLD), "512"], {}, EnvironmentCrashed)
    yield WorldProcess(await server.fork(), Losses())
    await server.close()


async def test_a_world_that_computes_while_it_starts_is_waited_for(worker, tmp_path):
    marker, patience_s = tmp_path / "go", 0.2
    starting = asyncio.create_task(worker.call(patience_s, "start", episode=1, task=f"compute-until {marker}"))
    await wait_until(Path(f"{marker}-is-awaited").exists)
    await asyncio.sleep(5 * patience_s)
    assert not starting.done()
    marker.touch()
    assert "observation" in await starting


async def test_a_world_that_hangs_while_it_starts_is_given_up(worker):
    with pytest.raises(LineStuck, match="no answer to 'start': the other side used no processor for 1 s"):
        await worker.call(1.0, "start", episode=1, task="hang")
    assert not worker.alive


async def test_a_cancelled_step_is_done_all_the_same(make_pool, tmp_path):
    environment = await started(await make_pool())
    marker = tmp_path / "go"
    step = asyncio.create_task(environment.step(f"wait-for {marker}"))
    await wait_until(Path(f"{marker}-is-awaited").exists)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    marker.touch()
    assert (await environment.grade()).reward == pytest.approx(1 / 3)


async def test_a_bug_of_the_world_ends_the_episode_in_a_grade(make_pool):
    environment = await started(await make_pool())
    await say(environment, "add")
    assert (await environment.step("raise")).done
    assert (await environment.grade()).reward == pytest.approx(1 / 3)


async def test_memory_is_bounded(make_pool):
    environment = await started(await make_pool())
    assert (await environment.step("eat")).failed


async def test_a_worker_sees_nothing_of_the_owners_environment(make_pool, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    (names,) = await say(await started(await make_pool()), "environment")
    assert "PYTHONHASHSEED" in names
    assert "TOKEN" not in names


async def test_what_a_world_started_goes_with_the_pool(make_pool):
    pool = await make_pool()
    (child,) = await say(await started(pool), "fork")
    os.kill(int(child), 0)  # it is there
    await pool.close()
    block_until(lambda: not Path(f"/proc/{child}").exists())


def test_nothing_outlives_an_owner_that_is_killed(tmp_path):
    path = [str(ROOT), str(ROOT / "contrib"), str(ROOT / "tests")]
    code = texts_beside(__file__)["owner"].format(path=path, world=str(FAKE_WORLD), python=sys.executable)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = owner.stdout.readline().strip()
    below = descendants(owner.pid)
    assert int(child) in below
    owner.kill()
    owner.wait()
    block_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))


async def test_what_is_missing_is_named(make_pool, tmp_path):
    with pytest.raises(FileNotFoundError, match="make environments"):
        await make_pool(python=str(tmp_path / "python"))
    with pytest.raises(ValueError, match="at least 1"):
        await make_pool(max_worlds=0)


async def test_a_worker_that_cannot_start_says_why():
    class Broken(FakePool):
        kind = WorldKind("broken", Path("/no/such/worker.py"))

    with pytest.raises(EnvironmentCrashed, match=r"broken does not start.*No such file"):
        await Broken(word_spans, sys.executable).open()


async def test_a_worker_finds_java_where_the_node_does(make_pool, monkeypatch, tmp_path):
    """Modules of a cluster put it into a folder of their own."""
    write_program(tmp_path / "java", "")
    monkeypatch.setenv("PATH", f"/nowhere:{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(FakePool, "kind", WorldKind("fake", FAKE_WORLD, memory_mb=512, heap_mb=64))
    kept = FakePool.kind.environment()
    assert kept["PATH"].split(":")[0] == str(tmp_path)
    assert "-Xmx64m" in kept["JAVA_TOOL_OPTIONS"]
    assert "JAVA_TOOL_OPTIONS" in (await say(await started(await make_pool()), "environment"))[0]
