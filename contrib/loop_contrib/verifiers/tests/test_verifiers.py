"""Tasksets of the package `verifiers`, in a stand-in of it: tasks, rewards, and what becomes of faults.

The drill plays a taskset by the package itself too, in the interpreter with `verifiers` 0.4 and `uv` that
VERIFIERS_PYTHON names, or in one that it makes.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.program_protocol import Connection
from agent_environments.protocol import EnvironmentCrashed, ProgramPool, UnknownTask, is_harness
from loop_contrib.verifiers.pool import VerifiersPool
from support.adapter_support import word_spans
from support.counter_node import counter_request, local_node
from support.episodes import begun_episode
from support.interpreters import with_packages
from support.places import check_who_waits_is_refused
from support.texts import texts_beside
from support.waiting import wait_until

TABLES = texts_beside(__file__)

SUPPORT = Path(__file__).parents[3] / "tests" / "contrib_support"
FAKE = SUPPORT / "fake_verifiers"
REPLIES = {"What is 1 plus 1?": "It is 2.", "What is 2 plus 1?": "It is 3" + " or so" * 20}
ASK_THE_PACKAGE = texts_beside(__file__)["ask_the_package"]


def pool(taskset="deeds-v1", **options):
    variables = {"PYTHONPATH": str(FAKE)}
    return VerifiersPool(word_spans, taskset, **{"python": sys.executable, "variables": variables, **options})


@pytest.fixture
async def opened():
    """Opens pools, one at a time."""
    pools = []

    async def open_pool(*arguments, **options):
        pools.append(pool(*arguments, **options))
        await pools[-1].open()
        return pools[-1]

    yield open_pool
    for each in pools:
        await each.close()


@pytest.fixture
async def policy_at():
    """An endpoint that answers in eleven letters, to whoever has the key in the address."""

    async def answer(request):
        body = await request.json()
        asked = body["messages"][-1]["content"]
        said = {"What is 1 plus 1?": "It is 2.", "What is 2 plus 1?": "It is 3" + " or so" * 20}.get(
            asked, "eleven it i"
        )
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        if not body.get("stream"):
            return web.json_response(whole)
        chunk = {**whole, "object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
        return web.Response(text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/sessions/sk-1/v1/chat/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


async def played(verifiers, task_id, url, max_turns=8):
    environment = GuardedEnvironment(await verifiers.acquire("e"))
    try:
        assert await environment.start(task_id) == []
        ended = await environment.inner.run(Connection(url, "sk-1", "e", "c", 0, max_turns))
        return await environment.grade(), ended
    finally:
        await environment.close()
        await environment.close()
        assert verifiers.status().open_worlds == 0


def test_only_a_node_plays_it():
    assert is_harness("verifiers")
    assert isinstance(pool(), ProgramPool)
    assert not pool().runs_elsewhere


async def test_tasks_have_the_tasksets_own_ids_and_the_splits_of_the_config(opened):
    deeds = await opened(splits={"train": {}, "dev": {"prefix": "dev-"}}, limit=2)
    assert deeds.tasks("train") == ["good", "raises"]
    assert deeds.tasks("dev") == ["dev-good", "dev-raises"]
    deeds.check_tasks(["good", "dev-raises"])
    with pytest.raises(UnknownTask, match="no task 'unscored'"):
        deeds.check_tasks(["unscored"])
    numbers = await opened("numbers-v1", held_out=1)
    ids = numbers.tasks("train") + numbers.tasks("held_out")
    assert sorted(ids) == ["numbers-v1_train_0", "numbers-v1_train_1", "numbers-v1_train_2"]
    endless = await opened("endless-v1", limit=2)
    assert endless.tasks("train") == ["endless-v1_train_0", "endless-v1_train_1"]


async def test_the_rewards_and_metrics_are_the_tasksets_own(opened, policy_at):
    deeds = await opened()
    grade, ended = await played(deeds, "good", policy_at)
    assert (grade.reward, grade.success, grade.ungradable, ended.status) == (1.0, True, None, 0)
    assert (grade.rewards, grade.metrics) == ({"turns": 1.0, "form": 1.0}, {"characters": 11.0})
    grade, _ = await played(deeds, "good", policy_at, max_turns=1)  # the request's limit is the agent's
    assert (grade.reward, grade.success, grade.rewards["turns"]) == (0.75, False, 0.5)


@pytest.mark.parametrize(("task", "why", "broke"), TABLES["what_cannot_be_graded_is_worth_nothing_and_told"])
async def test_what_cannot_be_graded_is_worth_nothing_and_told(opened, policy_at, task, why, broke):
    grade, _ = await played(await opened(), task, policy_at)
    assert (grade.reward, grade.success) == (0.0, False)
    assert why in grade.ungradable
    assert (grade.broke is not None) == broke
    assert not broke or why in grade.broke.what


@pytest.mark.parametrize(
    ("taskset", "task", "reward"),
    [
        ("heavy-v1", "best", 1.0),
        ("heavy-v1", "worst", 0.0),
        ("heavy-v1", "good", 1.0 / 1.5),
        ("penalty-v1", "best", 1.0),
        ("penalty-v1", "worst", 0.2),  # from -0.5 to 2
        ("penalty-v1", "good", 0.6),
        ("judged-v1", "best", 1.0),
        ("judged-v1", "good", 0.5),
    ],
)
async def test_the_weights_of_the_rewards_are_their_scale(opened, policy_at, taskset, task, reward):
    grade, _ = await played(await opened(taskset), task, policy_at)
    assert (grade.reward, grade.success, grade.ungradable) == (pytest.approx(reward), reward == 1.0, None)


async def test_an_episode_is_worth_the_mean_of_what_its_one_agent_plays(opened, policy_at):
    grade, _ = await played(await opened(), "twice", policy_at)
    assert (grade.reward, grade.ungradable) == (0.5, None)
    assert grade.rewards == {"turns": 0.5, "form": 1.0}


async def test_several_rewards_at_once_have_the_scale_of_the_config(opened, policy_at):
    grade, _ = await played(await opened("several-v1", scale=[0, 2]), "good", policy_at)
    assert grade.reward == 0.5


async def test_a_reward_beyond_its_scale_is_no_0_and_ends_what_is_played(opened, policy_at):
    deeds = await opened()
    why = r"taskset deeds-v1: the reward 1.5 is not from 0 to 1: give its scale .environment.scale: .lowest, highest"
    with pytest.raises(EnvironmentCrashed, match=why):
        await played(deeds, "outside", policy_at)
    for _ in range(2):
        with pytest.raises(EnvironmentCrashed, match=why):
            await deeds.acquire("e")
    assert deeds.status().open_worlds == 0


async def test_rewards_on_another_scale(opened, policy_at):
    deeds = await opened(scale=[0, 1.5])
    assert (await played(deeds, "outside", policy_at))[0].success
    grade, _ = await played(deeds, "good", policy_at)
    assert (grade.reward, grade.success) == (pytest.approx(2 / 3), False)


async def test_an_episode_that_is_ended_leaves_no_process_and_no_reward(opened, policy_at):
    deeds = await opened(limit=1, splits={"train": {}})
    async with begun_episode(deeds, "good") as environment:
        pid = environment._process.pid
        running = asyncio.create_task(environment.run(Connection("http://127.0.0.1:1/v1", "sk-1", "e", "c", 0, 8)))
        running.cancel()
        await asyncio.wait([running])
        grade = await environment.grade()
    assert (grade.reward, grade.broke) == (0.0, None)
    assert "ended before its taskset had graded it" in grade.ungradable
    await wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"python": "/nowhere/python"}, FileNotFoundError, "no interpreter at /nowhere/python"),
        (
            {"variables": {}},
            EnvironmentCrashed,
            "No module named 'verifiers' .the interpreter is .*: it needs the package",
        ),
        ({"taskset": "gone-v1"}, EnvironmentCrashed, "taskset gone-v1 server does not start: .* 'gone-v1' not found"),
        ({"taskset": "endless-v1"}, EnvironmentCrashed, "taskset endless-v1 has no end: set limit"),
        ({"taskset": "duo-v1"}, EnvironmentCrashed, "is played by 2 agents; an episode here has one"),
        ({"splits": {"train": {}, "dev": {}}}, ValueError, "two tasks 'good'"),
        ({"held_out": 10}, ValueError, "held_out is 10; of 10 groups"),
        ({"taskset": "needy-v1"}, EnvironmentCrashed, "No module named 'nltk': taskset 'needy-v1' not found"),
        (
            {"taskset": "several-v1"},
            ValueError,
            "reward may be several at once: set environment.scale to .lowest, high",
        ),
        ({"taskset": "endless weight-v1"}, ValueError, "the weights inf, 1.0: set environment.scale to"),
        ({"taskset": "weightless-v1"}, ValueError, "the weights 0.0, 0.0: set environment.scale to"),
    ],
)
async def test_a_config_that_cannot_be_played_is_refused_as_it_opens(options, error, why):
    refused = pool(**options)
    with pytest.raises(error, match=why):
        await refused.open()
    await refused.close()


async def test_who_waits_for_a_place_is_refused_when_the_pool_closes():
    await check_who_waits_is_refused(pool(max_worlds=1))


@pytest.mark.drill
async def test_ids_rewards_and_metrics_are_those_of_the_package_for_the_same_replies(opened, policy_at):
    real = with_packages("VERIFIERS_PYTHON", "verifiers==0.4.0", "uv")
    variables = {"PYTHONPATH": str(SUPPORT)}
    search = {"PATH": f"{os.path.dirname(real)}:{os.environ['PATH']}", **variables}
    url = policy_at.replace("/v1", "/sessions/sk-1/v1")
    process = await asyncio.create_subprocess_exec(
        *(real, "-c", ASK_THE_PACKAGE, url), stdout=asyncio.subprocess.PIPE, env={**os.environ, **search}
    )
    own = [json.loads(line) for line in (await process.communicate())[0].splitlines()]
    options = {"python": real, "variables": variables, "env": {"taskset": {"num_tasks": 3}}}
    sums = await opened("sums-v1", **options)
    assert sums.tasks("train") == [task for task, *_ in own] == ["train-1", "train-2", "train-3"]
    for task, reward, rewards, metrics in own:
        grade, ended = await played(sums, task, policy_at)
        assert (grade.ungradable, ended.status) == (None, 0)
        assert (grade.reward, grade.rewards, grade.metrics) == (pytest.approx(reward / 1.5), rewards, metrics)
    assert [reward for _, reward, *_ in own] == [1.5, 1.0, 0.5]


async def test_a_taskset_is_played_through_the_endpoint(policy, tmp_path):
    """A whole collection of a node; the second turn of the taskset is not told of the first."""
    taskset = {"name": "verifiers", "taskset": "deeds-v1", "python": sys.executable}
    taskset["variables"] = {"PYTHONPATH": str(FAKE)}
    async with local_node(policy, tmp_path / "node", environment=taskset) as running:
        rollouts, end = await running.collect(counter_request(tasks=["good", "raises"], rollouts_per_task=2))
        begun = running.node.pool.status().open_worlds
    assert (end.reason, begun) == ("complete", 0)
    for rollout in rollouts:
        assert (len(rollout.turns), rollout.segments) == (1, 2)
        (first,) = [each for each in rollouts if each.rollout_id == rollout.episode_id]
        stated = {"rewards": {"turns": 1.0, "form": 1.0}, "metrics": {"characters": len(first.messages[1]["content"])}}
        good = rollout.task_id == "good"
        assert (rollout.reward, rollout.extra.get("stated")) == ((1.0, stated) if good else (0.0, None))
        assert (rollout.broke is None) == good
