"""Several environments behind one pool."""

import asyncio

import pytest

from agent_environments.conformance import check_conformance
from agent_environments.description import DEFAULT_DESCRIPTION, environment_of
from agent_environments.protocol import EnvironmentCrashed, UnknownTask, acquire, create_pool
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool
from support.tool_modules import COUNTER, SUMS, call, write

HARNESS = {"command": ["true"], "world": {"name": "counter"}}
COUNTER_SECTION = {"name": "counter", "max_worlds": 2, "splits": {"valid": "dev"}}


@pytest.fixture
async def mixed(tmp_path):
    sums = {
        "name": "tools",
        "module": write(tmp_path, SUMS),
        "splits": {"valid": "dev", "test_normal": None},
    }
    async with open_pool(
        create_pool("mixed", {"environments": {"sums": sums, "to_number": COUNTER_SECTION}}, word_spans)
    ) as pool:
        yield pool


async def play(pool, task, *actions):
    async with begun_episode(pool, task) as environment:
        for action in actions:
            await environment.step(action)
        return await environment.grade()


@pytest.mark.slow
async def test_each_task_is_played_in_its_own_environment(mixed):
    assert mixed.dataset == "sums:mine + to_number:counter"
    assert (await play(mixed, "sums/sum_1", call("answer", value=42))).success
    assert (await play(mixed, "to_number/reach3_1", "```python\nadd(3)\nfinish()\n```")).success
    assert not (await play(mixed, "to_number/reach3_1", call("answer", value=42))).success
    assert mixed.status().open_worlds == 0


@pytest.mark.slow
def test_splits_under_the_names_that_each_environment_has(mixed):
    assert mixed.tasks("train")[:2] == ["sums/sum_1", "to_number/reach3_1"]
    assert {environment_of(task) for task in mixed.tasks("valid")} == {"sums", "to_number"}
    assert {environment_of(task) for task in mixed.tasks("test_normal")} == {"to_number"}
    with pytest.raises(UnknownTask, match="environment sums: no split 'test'; there are train, dev; say what"):
        mixed.tasks("test")
    for unknown in ("sum_1", "craft/sum_1", "sums/sum_2", "sums"):
        with pytest.raises(UnknownTask):
            mixed.check_tasks([unknown])
    mixed.check_tasks(mixed.tasks("train"))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sums/sum_1", "to_number/reach5_1"])
async def test_it_conforms(mixed, task):
    await check_conformance(mixed, task)


@pytest.mark.slow
async def test_who_waits_for_a_place_is_not_playing(mixed):
    """It has no environment yet, so no deadline of its own has begun; other environments have places all the while."""
    first, second = [await acquire(mixed, "episode", "to_number/reach3_1") for _ in range(2)]
    third = asyncio.create_task(acquire(mixed, "episode", "to_number/reach3_1"))
    other = await acquire(mixed, "episode", "sums/sum_1")
    await other.start("sums/sum_1")
    assert not third.done()
    await first.close()
    environment = await third
    assert (await environment.start("to_number/reach3_1"))[-1].content.endswith("from 0 to 3.")
    for open_one in (second, other, environment):
        await open_one.close()
    with pytest.raises(UnknownTask):
        await acquire(mixed, "episode", "craft/sum_1")
    assert mixed.status().open_worlds == 0


async def test_an_environment_may_be_a_mixture():
    inner = {"name": "mixed", "environments": {"to_number": {"name": "counter"}}}
    async with open_pool(
        create_pool("mixed", {"environments": {"both": inner, "alone": {"name": "counter"}}}, word_spans)
    ) as pool:
        tasks = pool.tasks("train")
        pool.check_tasks(tasks)
        assert tasks[0] == "both/to_number/reach3_1"
        assert {environment_of(task) for task in tasks} == {"both", "alone"}
        DEFAULT_DESCRIPTION.check_environments(["both"], tasks)
        assert (await play(pool, tasks[0], "```python\nadd(3)\nfinish()\n```")).success


def test_a_task_of_no_mixture_has_no_environment():
    assert environment_of("07b42fd_1") == ""


@pytest.mark.parametrize(
    ("environments", "complaint"),
    [
        ({}, "environments must name at least one"),
        ({"a/b": COUNTER_SECTION}, "environment 'a/b' must be called by"),
        ({"a": {"max_worlds": 2}}, "environments.a: missing key 'name'"),
        ({"a": {"name": "harness", **HARNESS}}, "environments.a: a harness cannot be part of a mixture"),
        ({"a": {"name": "nowhere"}}, "environments.a: unknown environment 'nowhere'"),
        ({"a": {"name": "counter", "max": 2}}, "environments.a: environment 'counter' was given options"),
    ],
)
def test_a_bad_configuration_is_one_line(environments, complaint):
    with pytest.raises(ValueError, match=complaint):
        create_pool("mixed", {"environments": environments}, word_spans)


@pytest.mark.slow
async def test_an_environment_that_does_not_open_is_an_error_of_the_mixture(tmp_path):
    broken = write(
        tmp_path,
        COUNTER.replace(
            "class Counter:", "class Counter:\n    def __init__(self):\n        raise OSError('no room')\n"
        ),
    )
    sections = {"a": {"name": "tools", "module": broken}, "b": COUNTER_SECTION}
    pool = create_pool("mixed", {"environments": sections}, word_spans)
    with pytest.raises(EnvironmentCrashed, match="an instance could not be made: OSError: no room"):
        await pool.open()
    await pool.close()
