"""The rollout node over the real AppWorld engine, with a scripted policy: real worlds, real grades, real deaths."""

import dataclasses
import os
import signal
from collections import Counter

import pytest
import pytest_asyncio

from loop_formats.branch import Branch
from loop_formats.collection_request import Limits
from loop_formats.rollout import BranchOf
from support.adapter_support import PYTHON, ROOT, needs_world
from support.counter_node import counter_request, local_node
from support.processes import episode_processes, processes
from support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.integration, needs_world, pytest.mark.asyncio(loop_scope="module")]

ENVIRONMENT = {
    "name": "appworld",
    "python": PYTHON,
    "root": str(ROOT),
    "prompt": "tiny",
    "observation_max_tokens": 200,
    "max_worlds": 6,
    "sandbox_minimum": "none",
}
LIMITS = Limits(max_turns=4, max_tokens_per_turn=400, max_context=4000, episode_deadline_s=DEADLINE_S)
MODEL = {"dtype": "float32", "max_context": 4096, "lora_rank": 8}


def speak(rng):
    return rng.choice(
        [
            "The profile.\n```python\nprint(apis.supervisor.show_profile())\n```",
            "```python\nprint(apis.api_docs.show_app_descriptions())\n```",
            "```python\nprint(1 / 0)\n```",
            "I do not know.",
        ]
    )


def speak_with_state(rng):
    """Turns whose answers depend on the turns before."""
    return rng.choice(
        [
            "```python\nseen = globals().get('seen', 0) + 1\nprint(seen)\n```",
            "```python\nprint(apis.supervisor.show_profile()['email'])\n```",
            "```python\nprint(undefined)\n```",
        ]
    )


def of_one(name, **changes):
    """One episode of up to six turns of everything asked for."""
    limits = dataclasses.replace(LIMITS, max_turns=6)
    return counter_request(name, **{"tasks": [], "rollouts_per_task": 1, "limits": limits, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(policy, tmp_path_factory):
    """A node of one after the other's collections, whose worlds and servers end with it."""
    model = {"path": str(policy / "model"), **MODEL}
    async with local_node(policy, tmp_path_factory.mktemp("node"), environment=ENVIRONMENT, model=model) as local:
        folder = str(local.node.pool.run_folder.path)
        yield local
        assert processes(folder)
    await wait_until(lambda: not processes(folder))  # no world outlives the node


async def test_worlds_die_and_the_collection_completes(local):
    local.vllm.speak = speak
    local.vllm.delay = lambda body: 0.05
    tasks = (await local.call(local.client.tasks, "train")).tasks[:3]
    request = counter_request("appworld", tasks=tasks, rollouts_per_task=4, limits=LIMITS)
    await local.call(local.client.start_collection, request)
    progress = lambda: next(c for c in local.node.status()["collections"] if c["id"] == "appworld")  # noqa: E731
    await wait_until(lambda: progress()["finished"] >= 4)
    killed = episode_processes(local.node.pool._servers["world"].pid)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    rollouts, end = await local.collect(request)
    assert end.reason == "complete"
    assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == {
        (task, index): 1 for task in tasks for index in range(4)
    }
    for rollout in rollouts:
        assert rollout.dataset.startswith("synthetic")
        assert rollout.end_reason == "turn_limit"
        assert len(rollout.requirements) >= 3
        assert not rollout.success
        assert "Task:" in rollout.messages[-1]["content"], "the reminder closes every observation"
        for turn, spoken in zip(rollout.turns, rollout.messages[-8::2], strict=True):
            assert turn.failed == ("1 / 0" in spoken["content"])


async def test_the_agent_can_end_its_episode(local):
    local.vllm.speak = lambda rng: "```python\napis.supervisor.complete_task(status='fail')\n```"
    tasks = (await local.call(local.client.tasks, "train")).tasks[:2]
    rollouts, end = await local.collect(counter_request(tasks=tasks, rollouts_per_task=1, limits=LIMITS))
    assert end.reason == "complete"
    assert {(rollout.end_reason, len(rollout.turns)) for rollout in rollouts} == {("completed", 1)}


async def test_branches_of_branches_go_on_token_for_token(local):
    """A policy that says the same again gets the same answers, so the same ids; one that does not goes elsewhere."""
    local.vllm.speak = speak_with_state
    tasks = (await local.call(local.client.tasks, "train")).tasks[:1]
    (parent,), _ = await local.collect(of_one("parent", tasks=tasks))
    said = {
        turn.start: message["content"]
        for turn, message in zip(parent.turns, parent.messages[-2 * len(parent.turns) :: 2], strict=True)
    }
    local.vllm.speak = lambda rng: said[len(local.vllm.requests[-1]["token_ids"])]
    rollout = parent
    for turns in (1, 3, 5):
        (again,), end = await local.collect(of_one(f"again-{turns}", branches=[Branch.of(rollout, [turns])]))
        assert (end.reason, end.refused) == ("complete", {})
        assert (again.token_ids, again.messages) == (parent.token_ids, parent.messages)
        assert again.branch_of == BranchOf(rollout.rollout_id, turns)
        assert (again.reward, again.requirements) == (parent.reward, parent.requirements)
        start = parent.turns[turns].start
        assert not any(again.mask[:start])
        assert again.mask[start:] == parent.mask[start:]
        rollout = again
    local.vllm.speak = lambda rng: "```python\napis.supervisor.complete_task(status='fail')\n```"
    (other,), _ = await local.collect(of_one("other", branches=[Branch.of(rollout, [5])]))
    assert (other.end_reason, len(other.turns)) == ("completed", 1)
    assert other.token_ids[: parent.turns[5].start] == parent.token_ids[: parent.turns[5].start]


async def test_a_world_that_answers_otherwise_refuses_the_branch(local):
    local.vllm.speak = speak_with_state
    tasks = (await local.call(local.client.tasks, "train")).tasks[:2]
    (parent,), _ = await local.collect(of_one("asked", tasks=tasks[:1]))
    stored = dataclasses.replace(parent, messages=[dict(message) for message in parent.messages])
    stored.messages[-1 - 2 * 3]["content"] += "."  # what answered turn 2 of 0 to 5
    moved = dataclasses.replace(Branch.of(parent, [3]), task_id=tasks[1])
    branches = [Branch.of(stored, [2, 4]), moved]
    rollouts, end = await local.collect(of_one("refused", branches=branches))
    assert [rollout.branch_of.turns for rollout in rollouts] == [2]
    assert end.reason == "complete"
    otherwise, opening = (end.refused[f"refused/{task}/{index}.0"] for task, index in ((tasks[0], 1), (tasks[1], 0)))
    assert otherwise.startswith(f"turn 2 of {parent.rollout_id} is answered otherwise")
    assert opening == f"the opening differs from that of {parent.rollout_id}"
    assert local.node.pool.status().open_worlds == 0
