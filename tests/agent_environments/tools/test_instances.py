"""A process for each episode, and its instance: how many there are, and what becomes of broken ones."""

import asyncio
import os
import re
import signal

import pytest

from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, Grade, Requirement
from agent_environments.tools.environment import ToolPool
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool
from support.places import check_who_waits_is_refused
from support.processes import exists, parent_of
from support.texts import texts_beside
from support.tool_modules import COUNTER, call, write
from support.waiting import wait_until


@pytest.fixture
async def counters(tmp_path):
    async with open_pool(ToolPool(word_spans, write(tmp_path, COUNTER), max_worlds=16)) as pool:
        yield pool


async def pid_of(environment):
    return (await environment._lease.process()).pid


async def test_episodes_at_once_see_only_their_own_instance(counters):
    everybody = asyncio.Barrier(16)

    async def play(number):
        environment = await counters.acquire(str(number))
        messages = await environment.start(f"count{number}_1")
        assert messages[-1].content == f"The counter of count{number}_1 shows 0."
        for step in range(1, number + 1):
            result = await environment.step(call("add", amount=1))
            assert result.observation == f"<tool_response>\ncount{number}_1: {step}\n</tool_response>"
            await asyncio.sleep(0)
        await everybody.wait()
        assert counters.status().open_worlds == 16
        grade = await environment.grade()
        await environment.close()
        return grade.success

    assert all(await asyncio.gather(*(play(number) for number in range(16))))
    assert counters.status().open_worlds == 0


async def test_there_are_as_many_places_as_before_after_crashes_and_timeouts(counters):
    kinds = ["add", "hang", "cancelled", "crash", "leave"]

    async def play(number):
        kind = kinds[number % len(kinds)]
        environment = await counters.acquire(str(number))
        try:
            if kind == "crash":
                with pytest.raises(EnvironmentCrashed, match=r"RuntimeError: cannot be reset \(.*\.py:\d+\)"):
                    await environment.start("broken_1")
                return
            await environment.start(f"count{number % 64}_1")
            if kind == "add":
                await environment.step(call("add", amount=number % 64))
                assert (await environment.grade()).success
            elif kind == "hang":
                with pytest.raises(EnvironmentTimeout, match=r"tool hang took longer than 0\.2 s"):
                    await environment.step(call("hang"))
                assert (await environment.grade()).reward in (0.0, 1.0)
            elif kind == "leave":
                assert (await environment.step(call("leave"))).done
                assert (await environment.grade()).ungradable
            else:
                step = asyncio.ensure_future(environment.step(call("hang")))
                await asyncio.sleep(0)
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
        finally:
            await environment.close()

    await asyncio.gather(*(play(number) for number in range(40)))
    assert counters.status().open_worlds == 0
    again = [await counters.acquire("again") for _ in range(16)]
    assert len({await pid_of(environment) for environment in again}) == 16
    for environment in again:
        await environment.close()


async def test_a_neighbour_plays_while_a_tool_holds_its_interpreter(tmp_path):
    """`(a+)+$` over a text of 60 letters would take years, and lets no other thread of its process run."""
    async with open_pool(ToolPool(word_spans, write(tmp_path, COUNTER), max_worlds=2)) as pool:
        hanging, neighbour = await pool.acquire("hanging"), await pool.acquire("neighbour")
        await hanging.start("count1_1")
        await neighbour.start("count20_1")
        step = asyncio.create_task(hanging.step(call("search", pattern="(a+)+$", text="a" * 60 + "b")))
        for _ in range(20):
            await neighbour.step(call("add", amount=1))
        assert (await neighbour.grade()).success
        assert not step.done()
        step.cancel()
        await asyncio.wait([step])
        assert (await hanging.grade()).reward == 0.0, "a regular expression can be interrupted, and its instance graded"
        for environment in (hanging, neighbour):
            await environment.close()


async def test_a_stateful_call_that_is_late_is_graded_as_it_stands(one):
    pool = await one()
    async with begun_episode(pool, "count3_1") as environment:
        await environment.step(call("add", amount=3))
        with pytest.raises(EnvironmentTimeout):
            await environment.step(call("hang"))
        assert (await environment.grade()).success
        before = await pid_of(environment)
    await wait_until(lambda: not exists(before))


async def test_work_that_cannot_be_interrupted_ends_with_its_process(one, monkeypatch):
    monkeypatch.setattr("loop_plumbing.forked_process.KILL_AFTER_S", 0.5)
    pool = await one()
    async with begun_episode(pool, "count3_1") as environment:
        before = await pid_of(environment)
        with pytest.raises(EnvironmentTimeout, match=r"tool power took longer than 0\.2 s, and was ended"):
            await environment.step(call("power"))
        await wait_until(lambda: not exists(before))
        grade = await environment.grade()
        assert (grade.reward, grade.ungradable) == (
            0.0,
            "the instance is gone: a tool that was called ended its process",
        )


async def test_a_call_that_ends_its_process_ends_the_episode(one):
    """It is the agent's doing: the episode is graded, and the next one has another process."""
    pool = await one()
    async with begun_episode(pool, "count0_1", "first") as environment:
        result = await environment.step(call("leave") + call("add", amount=1))
        assert (result.done, result.failed) == (True, True)
        assert result.observation == (
            "<tool_response>\nError: the tool failed: its process ended with status 3\n</tool_response>"
        )
        assert (await environment.grade()).ungradable
    async with begun_episode(pool, "count0_1") as environment:
        assert (await environment.grade()).success


async def test_a_reward_that_needs_no_instance_grades_without_one(one):
    parts = ("def reached(instance: Counter, target: int)", "instance.value == target")
    pool = await one(COUNTER.replace(parts[0], "def reached(target: int)").replace(parts[1], "target == 1"))
    async with begun_episode(pool, "count1_1") as environment:
        assert (await environment.step(call("leave"))).done
        assert (await environment.grade()).success


async def test_a_reward_that_takes_longer_than_it_may_is_told(one):
    source = COUNTER.replace(
        "-> bool:\n    return instance.value == target", "-> bool:\n    while True:\n        time.sleep(0.01)"
    ).replace("@reward", "@reward(deadline_s=0.1)")
    assert source.count("deadline_s=0.1)") == 1
    async with begun_episode(await one(source), "count1_1") as environment:
        broke = (await environment.grade()).broke
        assert (broke.where, broke.what) == ("reward reached", "DeadlinePassed: took longer than 0.1 s")


async def test_a_reward_that_raises_is_told(one):
    pool = await one(COUNTER.replace("== target", "/ target"))
    async with begun_episode(pool, "count0_1") as environment:
        grade = await environment.grade()
        assert (grade.reward, grade.broke.where) == (0.0, "reward reached")
        assert grade.ungradable == grade.broke.what
        assert re.fullmatch(r"ZeroDivisionError: .* \(.*mine\.py:\d+\)", grade.broke.what)
    assert pool.status().restarts == 0


async def test_an_instance_is_closed_with_its_episode_and_all_processes_with_the_pool(counters, tmp_path):
    environments = [await counters.acquire("open") for _ in range(2)]
    first, second = [await pid_of(environment) for environment in environments]
    await environments[0].close()
    assert (tmp_path / f"closed-{first}").exists()
    await counters.close()
    await wait_until(lambda: not exists(first) and not exists(second))
    await environments[1].close()
    assert counters.status().restarts == 0, "nothing takes the place of one in a closed pool"


async def test_who_waits_for_an_instance_is_refused_when_the_pool_closes(one):
    await check_who_waits_is_refused(await one())


async def test_an_instance_that_cannot_be_made_is_tried_again(one, tmp_path):
    making = '    def __init__(self):\n        if (FOLDER / "full").exists():\n            raise OSError("no room")\n\n'
    pool = await one(COUNTER.replace("    def reset", making + "    def reset", 1))
    (tmp_path / "full").touch()
    for _ in range(2):
        with pytest.raises(EnvironmentCrashed, match=r"could not be made: OSError: no room \(.*\.py:\d+\)"):
            await pool.acquire("again")
    (tmp_path / "full").unlink()
    await (await pool.acquire("last")).close()
    assert pool.status().open_worlds == 0


async def test_the_end_of_the_server_is_no_doing_of_an_agents(one):
    """All processes end with it; the episodes are repeated, with a new server."""
    pool = await one()
    async with begun_episode(pool, "count1_1", "first") as environment:
        before = await pid_of(environment)
        os.kill(parent_of(before), signal.SIGKILL)
        await wait_until(lambda: not exists(before))
        with pytest.raises(EnvironmentCrashed, match="the tool server has ended"):
            await environment.step(call("add", amount=1))
    async with begun_episode(pool, "count1_1") as environment:
        assert "count1_1: 1" in (await environment.step(call("add", amount=1))).observation


async def test_reset_may_be_async_and_call_its_parameter_what_it_likes(one):
    source = COUNTER.replace("    def reset(self, task):", "    async def reset(self, state):\n        task = state")
    environment = await (await one(source)).acquire("first")
    assert (await environment.start("count1_1"))[-1].content == "The counter of count1_1 shows 0."
    await environment.close()


TEXTS = texts_beside(__file__)
CART = TEXTS["cart"]


async def test_no_episode_changes_its_task_for_the_next_one(one):
    """Neither an instance that goes on working on a list of the task's, nor a reward that takes it apart."""
    pool = await one(CART)
    for _ in range(2):
        environment = await pool.acquire("episode")
        assert (await environment.start("cart_1"))[-1].content == "apple"
        await environment.step(call("add", name="pear"))
        assert (await environment.grade()).success
        await environment.close()


GRADES = TEXTS["grades"]


async def test_a_grade_of_numpys_numbers_comes_as_pythons_own(one):
    pool = await one(GRADES)
    async with begun_episode(pool, "task1", "first") as environment:
        await environment.step("0.25")
        grade = await environment.grade()
        assert grade == Grade(0.25, False, (Requirement("one", True),))
        assert {type(grade.success), type(grade.requirements[0].passed)} == {bool}
    async with begun_episode(pool, "task1") as environment:
        await environment.step("object")
        assert "Grade.ungradable" in (await environment.grade()).ungradable
