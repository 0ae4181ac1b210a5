"""The pool of instances: who has which, and what becomes of broken ones."""

import asyncio
import re
import sys

import pytest

from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout
from agent_environments.tools.environment import ToolPool
from agent_environments.tools.instances import InstancePool
from support.adapter_support import word_spans
from support.places import check_who_waits_is_refused
from support.tool_modules import COUNTER, call, write
from support.waiting import wait_until


@pytest.fixture
async def counters(tmp_path):
    pool = ToolPool(word_spans, write(tmp_path, COUNTER), max_worlds=64)
    await pool.open()
    yield pool
    await pool.close()


async def test_64_episodes_at_once_see_only_their_own_instance(counters):
    everybody = asyncio.Barrier(64)

    async def play(number):
        environment = await counters.acquire(str(number))
        messages = await environment.start(f"count{number}_1")
        assert messages[-1].content == f"The counter of count{number}_1 shows 0."
        for step in range(1, number + 1):
            result = await environment.step(call("add", amount=1))
            assert result.observation == f"<tool_response>\ncount{number}_1: {step}\n</tool_response>"
            await asyncio.sleep(0)
        await everybody.wait()
        assert counters.status().open_worlds == 64
        grade = await environment.grade()
        await environment.close()
        return grade.success

    assert all(await asyncio.gather(*(play(number) for number in range(64))))
    assert counters.status().open_worlds == 0


async def test_there_are_as_many_instances_as_before_after_crashes_and_timeouts(counters):
    kinds = ["add", "hang", "cancelled", "crash"]

    async def play(number):
        kind = kinds[number % len(kinds)]
        environment = await counters.acquire(str(number))
        try:
            if kind == "crash":
                with pytest.raises(EnvironmentCrashed, match="RuntimeError: cannot be reset"):
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
            else:
                step = asyncio.ensure_future(environment.step(call("hang")))
                await asyncio.sleep(0)
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
        finally:
            await environment.close()

    await asyncio.gather(*(play(number) for number in range(128)))
    await wait_until(lambda: counters.status().details["instances"] == 64)
    assert counters.status().open_worlds == 0
    assert counters.status().restarts >= 64
    again = [await counters.acquire("again") for _ in range(64)]
    assert len({id(environment._lease.instance) for environment in again}) == 64
    for environment in again:
        await environment.close()


@pytest.mark.parametrize("end", ["late", "cancelled"])
@pytest.mark.parametrize("takes_instance", [True, False])
async def test_an_instance_that_a_reward_may_still_work_on_is_not_lent_again(
    tmp_path, monkeypatch, end, takes_instance
):
    parameters = "instance: Counter, target: int" if takes_instance else "target: int"
    source = COUNTER.replace(
        "def reached(instance: Counter, target: int) -> bool:\n    return instance.value == target",
        f"def reached({parameters}) -> bool:\n"
        "    counter = Counter.made[0]\n    counter.graded = True\n"
        "    while not counter.ended:\n        time.sleep(0.01)",
    )
    assert source != COUNTER
    if end == "late":
        monkeypatch.setattr(sys.modules["agent_environments.tools.reward"], "DEADLINE_S", 0.1)
    pool = ToolPool(word_spans, write(tmp_path, source), max_worlds=1)
    await pool.open()
    environment = await pool.acquire("first")
    await environment.start("count1_1")
    instance = environment._lease.instance
    grade = asyncio.create_task(environment.grade())
    if end == "cancelled":
        await wait_until(lambda: hasattr(instance, "graded"))
        grade.cancel()
    if end == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            await grade
    else:
        broke = (await grade).broke
        assert (broke.where, broke.what) == ("reward reached", "DeadlinePassed: took longer than 0.1 s")
    await environment.close()
    environment = await pool.acquire("second")
    assert (environment._lease.instance is instance) == (not takes_instance)
    await environment.close()
    await pool.close()


async def test_a_reward_that_raises_leaves_its_instance_in_order(tmp_path):
    pool = ToolPool(word_spans, write(tmp_path, COUNTER.replace("== target", "/ target")), max_worlds=1)
    await pool.open()
    environment = await pool.acquire("first")
    await environment.start("count0_1")
    grade = await environment.grade()
    assert (grade.reward, grade.broke.where) == (0.0, "reward reached")
    assert grade.ungradable == grade.broke.what
    assert re.fullmatch(r"ZeroDivisionError: .* \(.*mine\.py:\d+\)", grade.broke.what)
    await environment.close()
    assert pool.status().restarts == 0
    await pool.close()


async def test_the_pool_closes_every_instance(counters):
    counter = counters._module.instance_class
    environment = await counters.acquire("open")
    environment._lease.broken = True
    await counters.close()
    assert len(counter.made) == 64
    assert sorted(map(id, counter.made)) == sorted(map(id, counter.closed))
    await environment.close()
    await asyncio.sleep(0)
    assert counters.status().restarts == 0, "nothing takes the place of a broken one in a closed pool"


async def test_whoever_waits_gets_the_next_one_first_come_first_served():
    pool = InstancePool(object, 1, 10.0)
    await pool.open()
    lease = await pool.acquire()
    order = []

    async def wait(name):
        mine = await pool.acquire()
        order.append(name)
        mine.end()
        mine.end()

    waiting = [asyncio.ensure_future(wait(name)) for name in "abc"]
    await wait_until(lambda: pool.waiting == 3)
    lease.end()
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c"]
    assert (pool.lent, pool.waiting, pool.instances) == (0, 0, 1)


async def test_who_waits_for_an_instance_is_refused_when_the_pool_closes(tmp_path):
    pool = ToolPool(word_spans, write(tmp_path, COUNTER), max_worlds=1)
    await pool.open()
    await check_who_waits_is_refused(pool)


async def test_an_instance_that_cannot_be_made_is_tried_again():
    works = True

    def make():
        if not works:
            raise OSError("no room")
        return object()

    pool = InstancePool(make, 1, 10.0)
    await pool.open()
    lease = await pool.acquire()
    works, lease.broken = False, True
    lease.end()
    for _ in range(2):
        with pytest.raises(EnvironmentCrashed, match="could not be made: OSError: no room"):
            await pool.acquire()
    works = True
    (await pool.acquire()).end()
    assert pool.instances == 1


async def test_reset_may_be_async_and_call_its_parameter_what_it_likes():
    class Lamp:
        async def reset(self, state):
            self.state = state
            return f"It is {state['light']}."

    pool = InstancePool(Lamp, 1, 10.0)
    await pool.open()
    lease = await pool.acquire()
    task = {"id": "lamp_1", "light": "on"}
    assert await lease.reset(task) == "It is on."
    lease.instance.state["light"] = "off"
    assert task["light"] == "on", "an episode's instance has a copy of its own"
    lease.end()


CART = '''
from agent_environments.tools import reward, tool


class Cart:
    def reset(self, task):
        self.items = task["items"]
        return ", ".join(self.items)

    @tool
    def add(self, name: str) -> str:
        """Put something in."""
        self.items.append(name)
        return "There it is."


@reward
def holds(instance: Cart, items: list[str], wanted: list[str]) -> bool:
    return instance.items == items + [wanted.pop()]


TASKS = [{"id": "cart_1", "items": ["apple"], "wanted": ["pear"]}]
'''


async def test_no_episode_changes_its_task_for_the_next_one(tmp_path):
    """Neither an instance that goes on working on a list of the task's, nor a reward that takes it apart."""
    pool = ToolPool(word_spans, write(tmp_path, CART), max_worlds=1)
    await pool.open()
    for _ in range(2):
        environment = await pool.acquire("episode")
        assert (await environment.start("cart_1"))[-1].content == "apple"
        await environment.step(call("add", name="pear"))
        assert (await environment.grade()).success
        await environment.close()
    await pool.close()
