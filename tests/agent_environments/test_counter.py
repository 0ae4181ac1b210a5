import pytest

from agent_environments.counter import TARGETS, CounterPool
from agent_environments.protocol import Environment, EnvironmentPool, UnknownTask, create_pool
from support.episodes import begun_episode
from support.places import check_who_waits_is_refused


def spans(text):
    return [(index, index + 1) for index in range(len(text))]


def act(*calls):
    return "Let me try.\n```python\n" + "\n".join(calls) + "\n```"


async def play(pool, task, *actions):
    async with begun_episode(pool, task) as environment:
        steps = [await environment.step(action) for action in actions]
        grade = await environment.grade()
    await environment.close()
    return steps, grade


async def test_is_of_the_protocol():
    pool = create_pool("counter", {"max_worlds": 2}, spans)
    assert isinstance(pool, EnvironmentPool)
    await pool.open()
    environment = await pool.acquire("episode")
    assert isinstance(environment, Environment)
    await environment.close()
    await pool.close()


async def test_solving_pays_one():
    steps, grade = await play(CounterPool(spans), "reach12_1", act("add(9)", "show()"), act("add(3)", "finish()"))
    assert steps[0].observation == "9\nAs a reminder\n\nTask: Bring the counter from 0 to 12."
    assert [step.done for step in steps] == [False, True]
    assert steps[1].observation == "Execution successful."
    assert (grade.reward, grade.success) == (1.0, True)


@pytest.mark.parametrize(
    ("actions", "reward"),
    [((), 0.25), ((act("finish()"),), 0.5), ((act("add(9)", "finish()"),), 0.75), ((act("add(99)"),), 0.0)],
)
async def test_rewards_are_graded(actions, reward):
    _, grade = await play(CounterPool(spans), "reach12_1", *actions)
    assert grade.reward == reward
    assert not grade.success


@pytest.mark.parametrize("code", ["add(99)", "add('1')", "import os", "add(1", "jump()", "add(n=1)", "().__class__"])
async def test_bad_code_fails_and_the_episode_goes_on(code):
    steps, _ = await play(CounterPool(spans), "reach3_1", act(code), act("add(3)", "show()"))
    assert steps[0].failed
    assert steps[0].observation.startswith("Execution failed. Traceback:\n")
    assert not steps[1].failed
    assert steps[1].observation.startswith("3\n")


async def test_no_code_is_counted():
    steps, _ = await play(CounterPool(spans), "reach3_1", "I think it is done.")
    assert steps[0].empty_action
    assert not steps[0].failed


async def test_who_waits_for_a_place_is_refused_when_the_pool_closes():
    await check_who_waits_is_refused(CounterPool(spans, max_worlds=1))


async def test_unknown_names():
    pool = CounterPool(spans)
    assert set(pool.tasks("train")) == set(TARGETS["train"])
    with pytest.raises(UnknownTask, match="train"):
        pool.tasks("trane")
    with pytest.raises(UnknownTask, match="reach99"):
        pool.check_tasks(["reach3_1", "reach99_1"])


def test_unknown_environment_and_option():
    with pytest.raises(ValueError, match="counter"):
        create_pool("countr", {}, spans)
    with pytest.raises(ValueError, match="max_world"):
        create_pool("counter", {"max_world": 1}, spans)
