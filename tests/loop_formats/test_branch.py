"""Going on from stored rollouts: what a branch carries, and what a node makes of it on the counter environment."""

import dataclasses
import json
import random

import pytest

from agent_environments.counter import CounterEnvironment, CounterPool
from agent_environments.protocol import EnvironmentTimeout
from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import BranchOf
from loop_formats.schema import ConfigError
from rollout_server.client import RolloutNodeError
from support.counter_node import counter_request, local_node
from support.scripted_vllm import ScriptedVllm, expected_logprob
from support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

LIMITS = Limits(max_turns=8, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=DEADLINE_S)
ENDLESS = ["```python\nadd(1)\n```", "```python\nshow()\n```", "thinking"]


def branching(*branches, name="b1", **changes):
    """A request for one episode from every point."""
    values = {"tasks": [], "rollouts_per_task": 1, "limits": LIMITS, **changes}
    return counter_request(name, branches=list(branches), **values)


async def collect_long(local, name="c1", **changes):
    """Two rollouts that play all eight turns."""
    local.vllm.speak = lambda rng: rng.choice(ENDLESS)
    request = counter_request(name, **{"tasks": ["reach8_1"], "rollouts_per_task": 2, "limits": LIMITS, **changes})
    rollouts, _ = await local.collect(request)
    return sorted(rollouts, key=lambda rollout: rollout.index)


def own_turns(rollout):
    """Numbers, in its episode, of the turns that a rollout sampled itself."""
    return range(rollout.turns_before, rollout.turns_before + len(rollout.turns))


def check_continues(branch, parent, vllm):
    """The branch has its parent's past exactly as it was served, and nothing of it is to be trained."""
    branch.validate()
    turns = branch.branch_of.turns
    start = parent.turns[turns - parent.turns_before].start
    assert branch.branch_of == BranchOf(parent.rollout_id, turns)
    assert branch.token_ids[:start] == parent.token_ids[:start]
    assert branch.messages[: 2 + 2 * turns] == parent.messages[: 2 + 2 * turns]
    assert branch.turns[0].start == start
    assert not any(branch.mask[:start])
    for position, sampled in enumerate(branch.mask):
        assert branch.sampler_logprobs[position] == (expected_logprob(position) if sampled else 0.0)
    served = [r["token_ids"] for r in vllm.requests if r["request_id"].startswith(branch.rollout_id)]
    assert served[0] == parent.token_ids[:start]


async def grade_of(rollout):
    """What a fresh world makes of all actions of the rollout's episode."""
    world = CounterEnvironment(CounterPool(lambda text: [(i, i + 1) for i in range(len(text))]))
    await world.start(rollout.task_id)
    for message in rollout.messages:
        if message["role"] == "assistant":
            await world.step(message["content"])
    return await world.grade()


async def test_branches_go_on_from_the_ids_as_they_were_served(running):
    """Property: of random episodes at random turns, and of branches in their turn."""
    draw, vllm = random.Random(0), running.vllm
    for case in range(6):
        vllm.speak = ScriptedVllm.play if case % 2 else lambda rng: rng.choice(ENDLESS)
        request = counter_request(f"c{case}", rollouts_per_task=2, seed=draw.randrange(2**20), limits=LIMITS)
        known = {rollout.rollout_id: rollout for rollout in (await running.collect(request))[0]}
        for generation in range(3):
            parents = draw.sample([known[name] for name in sorted(known)], 4)
            points = [draw.sample(own_turns(parent), min(2, len(parent.turns))) for parent in parents]
            asked = [Branch.of(parent, turns) for parent, turns in zip(parents, points, strict=True)]
            request = branching(*asked, name=f"b{case}-{generation}", rollouts_per_task=2)
            rollouts, end = await running.collect(request)
            assert (end.reason, end.refused, len(rollouts)) == ("complete", {}, 2 * sum(map(len, points)))
            for rollout in rollouts:
                check_continues(rollout, known[rollout.branch_of.rollout_id], vllm)
                grade = await grade_of(rollout)
                assert (rollout.reward, rollout.success) == (grade.reward, grade.success)
            known |= {rollout.rollout_id: rollout for rollout in rollouts}
    assert max(rollout.turns_before for rollout in known.values()) > 4


async def test_a_policy_that_says_the_same_again_makes_the_same_rollout(policy, tmp_path):
    """Of a branch of a branch too: token for token."""
    async with local_node(policy, tmp_path / "node", max_concurrent_episodes=1) as local:
        (parent,) = await collect_long(local, rollouts_per_task=1)
        said = {turn.start: message for turn, message in zip(parent.turns, parent.messages[2::2], strict=True)}
        local.vllm.speak = lambda rng: said[len(local.vllm.requests[-1]["token_ids"])]["content"]
        for number, turns in enumerate((3, 5, 7)):
            (again,), _ = await local.collect(branching(Branch.of(parent, [turns]), name=f"b{number}"))
            assert again.token_ids == parent.token_ids
            assert again.messages == parent.messages
            assert again.turns_before == turns
            parent = again


async def test_a_branch_draws_anew(running):
    """Same seed, task and index as its parent: it must not repeat what that one drew."""
    parent = (await collect_long(running))[0]
    rollouts, _ = await running.collect(branching(Branch.of(parent, range(8)), rollouts_per_task=4))
    assert len(rollouts) == 32
    assert len({tuple(rollout.token_ids) for rollout in rollouts}) > 16


async def test_limits_count_what_was_replayed(running):
    parent = (await collect_long(running))[0]
    rollouts, _ = await running.collect(branching(Branch.of(parent, [5])))
    assert [(rollout.end_reason, len(rollout.turns)) for rollout in rollouts] == [("turn_limit", 3)]
    room = dataclasses.replace(LIMITS, max_turns=40, max_context=parent.turns[6].end)
    rollouts, _ = await running.collect(branching(Branch.of(parent, [5]), name="b2", limits=room))
    assert [rollout.end_reason for rollout in rollouts] == ["context_limit"]
    assert len(rollouts[0].token_ids) <= room.max_context


async def test_a_world_that_answers_otherwise_is_refused(running):
    """Only the branches that meet the difference, at once and without a token sampled; counted and told."""
    sound, other = await collect_long(running)
    changed = dataclasses.replace(other, messages=[dict(message) for message in other.messages])
    changed.messages[7]["content"] += "!"  # what answered turn 2
    asked = len(running.vllm.requests)
    request = branching(Branch.of(sound, [3]), Branch.of(changed, [2, 3, 6]), rollouts_per_task=2)
    rollouts, end = await running.collect(request)
    assert (end.reason, end.failures, end.finished, len(end.refused)) == ("complete", {}, 4, 4)
    went_on = {(rollout.branch_of.rollout_id, rollout.branch_of.turns) for rollout in rollouts}
    assert went_on == {(sound.rollout_id, 3), (other.rollout_id, 2)}
    assert set(end.refused) == {f"b1/reach8_1/{index}.0" for index in (4, 5, 6, 7)}
    why = next(iter(end.refused.values()))
    assert why.startswith(f"turn 2 of {other.rollout_id} is answered otherwise from character ")
    assert len(running.vllm.requests) - asked == sum(len(rollout.turns) for rollout in rollouts)
    metrics = running.node.metrics.render().decode()
    assert 'rollout_episode_failures_total{reason="branch_differs"} 4.0' in metrics


async def test_a_stored_action_that_takes_too_long_is_refused_once(running, monkeypatch):
    parent, _ = await collect_long(running)
    step = CounterEnvironment.step

    async def slow(environment, action):
        if len(environment.__dict__.setdefault("steps", [])) == 1:
            raise EnvironmentTimeout("the code ran too long")
        environment.steps.append(action)
        return await step(environment, action)

    monkeypatch.setattr(CounterEnvironment, "step", slow)
    rollouts, end = await running.collect(branching(Branch.of(parent, [3])))
    assert (rollouts, end.reason, end.failures, end.lost) == ([], "complete", {}, [])
    assert end.refused == {
        "b1/reach8_1/0.0": f"turn 1 of {parent.rollout_id} now takes too long: the code ran too long"
    }


async def test_refusals_are_kept_over_a_restart(policy, tmp_path):
    async with local_node(policy, tmp_path / "node") as local:
        parent, _ = await collect_long(local)
        changed = dataclasses.replace(
            parent, messages=[*parent.messages[:3], {"role": "user", "content": "no"}, *parent.messages[4:]]
        )
        request = branching(Branch.of(parent, [1]), Branch.of(changed, [1]))
        local.vllm.answers = lambda body: False  # the sound branch goes on for as long as this node lives
        await local.call(local.client.start_collection, request)
        run = await local.node.collection("b1")
        await wait_until(lambda: run.collector.refused)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        rollouts, end = await local.collect(request)
        assert (end.reason, len(rollouts), len(end.refused)) == ("complete", 1, 1)
        assert 'reason="branch_differs"' not in local.node.metrics.render().decode()


async def test_a_collection_whose_branches_are_all_refused_ends(running):
    parent, _ = await collect_long(running)
    changed = dataclasses.replace(
        parent, messages=[{"role": "system", "content": "another prompt"}, *parent.messages[1:]]
    )
    with pytest.raises(RolloutNodeError, match="its first token_ids are not its opening in this model's tokenizer"):
        await running.collect(branching(Branch.of(changed, [1])))
    moved = dataclasses.replace(Branch.of(parent, [1]), task_id="reach5_1")
    rollouts, end = await running.collect(branching(moved, name="b2"))
    assert (end.reason, rollouts) == ("complete", [])
    assert list(end.refused.values()) == [f"the opening differs from that of {parent.rollout_id}"]


async def test_tasks_and_branches_of_one_task_share_a_collection(running):
    """Every rollout of a task has an index of its own, and the floor holds for each point by itself."""
    parent, _ = await collect_long(running)
    rollouts, end = await running.collect(branching(Branch.of(parent, [2, 4]), tasks=["reach8_1"], rollouts_per_task=3))
    assert end.reason == "complete"
    origins = {rollout.index: rollout.branch_of and rollout.branch_of.turns for rollout in rollouts}
    assert origins == dict(enumerate([None] * 3 + [2] * 3 + [4] * 3))


async def test_a_branch_of_another_dataset_is_refused_before_work(running):
    parent, _ = await collect_long(running)
    other = dataclasses.replace(Branch.of(parent, [1]), dataset="another")
    with pytest.raises(RolloutNodeError, match="is of dataset another, not counter"):
        await running.call(running.client.start_collection, branching(other))


async def test_what_a_branch_cannot_be(running):
    parent, _ = await collect_long(running)
    (branch,), _ = await running.collect(branching(Branch.of(parent, [5])))
    silent = dataclasses.replace(parent, token_ids=[], mask=[], sampler_logprobs=[])
    several = dataclasses.replace(parent, segments=2)
    twice = f"sampled turns 5 to 7, not turn 4; branch {parent.rollout_id}, which it"
    for rollout, turns, limits, message in (
        (parent, [8], {}, "sampled turns 0 to 7, not turn 8"),
        (branch, [6, 4], {}, twice),
        (silent, [0], {}, "has no token ids to go on from"),
        (several, [0], {}, f"episode {parent.rollout_id} is 2 sequences"),
        (parent, [7], {"max_turns": 7}, "goes on after 7 turns, max_turns is 7"),
        (parent, [7], {"max_context": 20}, "tokens, max_context is 20"),
        (parent, [7], {"compaction": "drop"}, "compaction must be null where episodes go on from stored"),
        (parent, [], {}, "points must be at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            branching(Branch.of(rollout, turns), limits=dataclasses.replace(LIMITS, **limits))


async def test_a_request_survives_its_json(running):
    parent, _ = await collect_long(running)
    request = branching(Branch.of(parent, [0, 3]))
    assert CollectionRequest.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    damaged = request.to_dict()
    damaged["branches"][0]["points"][1]["tokens"] = 10_000
    with pytest.raises(ConfigError, match=r"branches\[0\].*points go beyond the \d+ token_ids"):
        CollectionRequest.from_dict(damaged)
