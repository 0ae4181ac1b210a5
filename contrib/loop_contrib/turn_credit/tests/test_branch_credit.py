"""Credits of turns from continuations: the arithmetic, and on a node whose episodes go on from stored turns."""

from dataclasses import replace

import pytest

from loop_contrib.turn_credit import branch_credit
from loop_contrib.turn_credit.branch_credit import branch_credits, value_changes, with_unequal_returns
from loop_formats.collection_request import CollectionEnd, Limits, Sampling
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.rollouts.branching import HowToSample
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.source import NoRollouts
from rollout_server.client import CollectionFailed
from support.counter_node import counter_request, local_node
from support.fake_node import FixedNode, collected
from support.small_runs import stored_rollout
from support.waiting import COMMAND_S, DEADLINE_S


def test_a_turn_changes_the_value_by_the_next_state_or_the_return():
    assert value_changes([0.25, 0.5, 0.0], 1.0) == [0.25, -0.5, 1.0]
    assert value_changes([0.5, None, 0.75], 0.75) == [0.0, 0.25, 0.0], "an unknown state is no change"
    assert value_changes([None, 0.5], 1.0) == [0.0, 0.5]
    assert value_changes([None, None], 1.0) == [0.0, 0.0]


def test_rollouts_of_tasks_without_contrast_are_not_gone_on_from():
    rewards = {"task_1": (0.0, 1.0), "task_2": (1.0, 1.0)}
    rollouts = [
        stored_rollout("c", task, index, 0, reward, 97, index)
        for task, pair in rewards.items()
        for index, reward in enumerate(pair)
    ]
    assert {rollout.task_id for rollout in with_unequal_returns(rollouts, UpdateConfig())} == {"task_1"}
    unended = [replace(rollouts[3], end_reason="turn_limit")]
    ways = [UpdateConfig(unfinished_return=unfinished) for unfinished in ("graded", "zero")]
    paid = {way.unfinished_return: with_unequal_returns(rollouts[:3] + unended, way) for way in ways}
    assert {name: {r.task_id for r in kept} for name, kept in paid.items()} == {
        "graded": {"task_1"},
        "zero": {"task_1", "task_2"},
    }


def with_texts(rollout):
    """The same with messages, which a branch needs."""
    messages, turns = [{"role": "user", "content": "do it"}], []
    for turn in rollout.turns:
        turns.append(replace(turn, message=len(messages)))
        messages += [{"role": "assistant", "content": "act"}, {"role": "user", "content": "seen"}]
    return replace(rollout, messages=messages, turns=turns)


def test_the_requests_of_a_part_share_one_deadline(monkeypatch):
    """Of two versions, so two requests: what the first takes is gone for the second."""
    rollouts = [with_texts(stored_rollout("c", "task_1", index, index, 1.0, 97, index)) for index in range(2)]
    clock, given = [100.0], []

    def slow(request, deadline_s):
        given.append(deadline_s)
        clock[0] += 40.0
        return collected([])

    monkeypatch.setattr(branch_credit.running_time, "now", lambda: clock[0])
    how = {version: HowToSample(1, version, Sampling(), Limits()) for version in range(2)}
    branch_credits(FixedNode(slow), rollouts, how, UpdateConfig(), deadline_s=60.0)
    assert given == [60.0, 20.0]


async def test_a_read_has_the_shorter_deadline(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_server.app.HEARTBEAT_S", 0.1)
    async with local_node(policy, tmp_path) as local:
        local.vllm.answers = lambda body: False
        source = NodeSource(local.client, None, DEADLINE_S, COMMAND_S, lambda: False)
        request = counter_request()
        await local.call(source.start, request)
        with pytest.raises(NoRollouts, match=r"had 0 of 12 rollouts after 0 s \(what was left of its deadline\)"):
            await local.call(source.read, request, 0.3)


async def test_credits_are_the_differences_of_the_known_values(policy, tmp_path):
    """On reach6 a quarter each for a counter of 6, one above 3, finishing, and one more that is always given."""
    limits = Limits(max_turns=4, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=DEADLINE_S)
    async with local_node(policy, tmp_path) as local:
        local.vllm.speak = lambda rng: "```python\nadd(3)\n```"
        request = counter_request(tasks=["reach6_1"], rollouts_per_task=2, limits=limits)
        rollouts, _ = await local.collect(request)
        local.vllm.speak = lambda rng: "```python\nfinish()\n```"
        source = NodeSource(local.client, None, DEADLINE_S, COMMAND_S, lambda: False)
        how = {0: HowToSample(2, 0, Sampling(), limits)}
        graded = await local.call(branch_credits, source, rollouts, how, UpdateConfig())
        unpaid = await local.call(branch_credits, source, rollouts[:1], how, UpdateConfig(unfinished_return="zero"))
    # Whoever finishes at 0, 3, 6 or 9 is paid 0.5, 0.5, 1 or 0.75; these four turns end at 12, unfinished, with 0.5.
    assert graded == {rollout.rollout_id: [0.0, 0.5, -0.25, -0.25] for rollout in rollouts}
    assert unpaid == {rollouts[0].rollout_id: [0.0, 0.5, -0.25, -0.75]}
    failing = FixedNode(CollectionFailed("too many attempts failed", CollectionEnd("failed", 0, 0, 0, {}, 0.0)))
    assert branch_credits(failing, rollouts, how, UpdateConfig()) == {}, "they keep the one advantage of the rollout"
