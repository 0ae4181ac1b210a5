"""One trainer over two real rollout nodes: shares, early stop, versions on both, failures, stopping."""

import asyncio
import json
from dataclasses import replace

import pytest

from agent_environments.description import Description
from loop_formats.branch import Branch, BranchPoint
from loop_formats.collection_request import CollectionEnd, LostRollout
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.several_nodes import SeveralNodes, merge_ends, split_request
from loop_recipes.rollouts.source import NoRollouts
from loop_recipes.run.stop_request import StopRequested
from rollout_server.client import CollectionFailed, NodeUnreachable, RolloutClient, RolloutNodeError
from support.counter_node import TOKEN, counter_request, local_node, two_nodes
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

TASKS = ["reach3_1", "reach3_2", "reach5_1", "reach5_2", "reach8_1"]


def several(urls, stop_requested=lambda: False, reconnect_s=2.0, start_deadline_s=DEADLINE_S):
    def open_node(url, stop):
        def alive():
            if stop():
                raise StopRequested

        client = RolloutClient(url, TOKEN, reconnect_s=reconnect_s, alive=alive)
        return NodeSource(client, None, start_deadline_s=start_deadline_s, deadline_s=DEADLINE_S, stop_requested=stop)

    return SeveralNodes(open_node, urls, stop_requested)


def test_shares_are_disjoint_whole_and_at_most_one_per_task():
    request = counter_request("run-i0007", tasks=TASKS, min_rollouts_fraction=0.5)
    first, second = split_request(request, 2)
    assert (first.id, second.id) == ("run-i0007-1of2", "run-i0007-2of2")
    assert (first.tasks, second.tasks) == (TASKS[0::2], TASKS[1::2])
    assert first.floor_total + second.floor_total >= request.floor_total
    assert replace(first, id=request.id, tasks=TASKS) == request
    assert [share.tasks for share in split_request(request, 9)] == [[task] for task in TASKS]
    some = [share.only for share in split_request(replace(request, only={TASKS[1]: [2], TASKS[2]: [0]}), 2)]
    assert some == [{TASKS[2]: [0]}, {TASKS[1]: [2]}]


def test_branches_are_shared_among_the_nodes_too():
    point = BranchPoint(0, 2)
    branches = [Branch(f"c/{task}/0.0", task, "counter", [], [], [1, 2], [point]) for task in TASKS]
    request = counter_request("run", tasks=TASKS[:1], branches=branches)
    shares = split_request(request, 2)
    assert [share.tasks for share in shares] == [TASKS[:1], []]
    dealt = [branch for share in shares for branch in share.branches]
    assert sorted(branch.rollout_id for branch in dealt) == sorted(branch.rollout_id for branch in branches)
    assert sum(share.episodes for share in shares) == request.episodes


def test_ends_add_up():
    lost = [LostRollout(task, 0, "server_error", "boom") for task in ("t_1", "t_2")]
    ends = [
        CollectionEnd("complete", 6, 0, 0, {"a": 1}, 3.0, refused={"a": "why"}, lost=lost[:1]),
        CollectionEnd("early_stop", 4, 2, 90, {"a": 1, "b": 2}, 5.0, refused={"b": "why"}, lost=lost[1:]),
    ]
    refused = {"a": "why", "b": "why"}
    whole = CollectionEnd("early_stop", 10, 2, 90, {"a": 2, "b": 2}, 5.0, refused=refused, lost=lost)
    assert merge_ends(ends) == whole
    assert merge_ends(ends[:1]) == ends[0]


async def test_a_collection_is_shared_and_comes_back_whole(policy, tmp_path):
    async with two_nodes(policy, tmp_path) as nodes:
        source = several([node.url for node in nodes])
        assert await asyncio.to_thread(source.wait_ready) == [0]
        dataset, _ = await asyncio.to_thread(source.tasks, "train")
        assert dataset == "counter"
        request = counter_request("shared", tasks=TASKS)
        await asyncio.to_thread(source.start, request)
        collected = await asyncio.to_thread(source.read, request)
        assert sorted((rollout.task_id, rollout.index) for rollout in collected.rollouts) == sorted(
            (task, index) for task in TASKS for index in range(4)
        )
        assert (collected.end.reason, collected.end.finished) == ("complete", 20)
        for node, share in zip(nodes, (TASKS[0::2], TASKS[1::2]), strict=True):
            (log,) = node.node.root.glob("collections/shared-?of2.jsonl")
            assert {json.loads(line)["task_id"] for line in log.read_text().splitlines()} == set(share)
        # Asked again, as after a restart: the same rollouts, none sampled anew.
        again = await asyncio.to_thread(source.read, request)
        assert {rollout.rollout_id for rollout in again.rollouts} == {r.rollout_id for r in collected.rollouts}


async def test_losses_that_are_too_many_for_the_whole_fail_it_and_are_attempted_anew(policy, tmp_path):
    """Each node lost one, as it may; together they lost two."""
    async with two_nodes(policy, tmp_path) as nodes:
        source = several([node.url for node in nodes])
        for node in nodes:
            node.vllm.fault = lambda body: 400 if "/0." in body["request_id"] else None
        request = counter_request("lossy", tasks=TASKS[:2], max_lost=1)
        await asyncio.to_thread(source.start, request)
        with pytest.raises(CollectionFailed, match=r"lossy failed: 2 of 8 rollouts lost .*, where 1 may be") as raised:
            await asyncio.to_thread(source.read, request)
        assert {lost.task_id for lost in raised.value.end.lost} == set(TASKS[:2])
        for node in nodes:
            node.vllm.fault = lambda body: None
        await asyncio.to_thread(source.start, request)
        collected = await asyncio.to_thread(source.read, request)
        assert (len(collected.rollouts), collected.end.lost) == (8, [])


async def test_one_node_may_lose_all_its_share(policy, tmp_path):
    async with two_nodes(policy, tmp_path) as nodes:
        source = several([node.url for node in nodes])
        nodes[0].vllm.fault = lambda body: 400
        request = counter_request("half", tasks=TASKS[:2])
        await asyncio.to_thread(source.start, request)
        collected = await asyncio.to_thread(source.read, request)
        assert (len(collected.rollouts), len(collected.end.lost)) == (4, 4)


async def test_every_node_is_given_every_version(policy, tmp_path):
    async with two_nodes(policy, tmp_path) as nodes:
        source = several([node.url for node in nodes])
        await asyncio.to_thread(source.publish, 1, policy / "adapter1")
        assert await asyncio.to_thread(source.wait_ready) == [0, 1]
        await asyncio.to_thread(source.retire, 0)
        for node in nodes:
            assert (await node.call(node.client.health))["policy_versions"] == [1]
        await asyncio.to_thread(source.retire, 0)


async def test_nodes_that_differ_are_refused(policy, tmp_path, monkeypatch):
    async with two_nodes(policy, tmp_path) as (west, east):
        source = several([west.url, east.url])
        assert await asyncio.to_thread(source.description) == west.node.description
        size = (await west.call(west.client.health))["vocabulary"]
        elsewhere = {**east.node.health(), "model": "/elsewhere/model"}
        monkeypatch.setattr(east.node, "health", lambda: elsewhere)
        assert (await asyncio.to_thread(source.health))["vocabulary"] == size, "one model at two paths"
        await asyncio.to_thread(source.check_model, size, range(1024, 4096))
        for contexts, held in ((range(1, 1024), "up to 1023"), (range(1025, 4096), "over 1024")):
            with pytest.raises(NoRollouts, match=rf"that hold 1024 tokens.* hold {held} \(longrope\); give it"):
                await asyncio.to_thread(source.check_model, size, contexts)
        told = {**east.node.health(), "vocabulary": size + 8}
        monkeypatch.setattr(east.node, "health", lambda: told)
        east.node.pool.description, east.node.pool.dataset = Description(score="wins"), "another"
        for asked, said in (
            ((source.description,), "describe their environments differently"),
            ((source.tasks, "train"), r"have different datasets \(counter and another\)"),
            ((source.check_model, size, range(2048)), rf"at {east.url} serves .* of {size + 8} .* has one of {size};"),
        ):
            with pytest.raises(NoRollouts, match=said):
                await asyncio.to_thread(*asked)


async def test_the_error_of_one_node_ends_the_wait_for_the_other(policy, tmp_path):
    async with two_nodes(policy, tmp_path) as (west, east):
        source = several([west.url, east.url])
        request = counter_request("half", tasks=TASKS)
        first, _ = split_request(request, 2)
        west.vllm.delay = lambda body: 600.0
        await west.call(west.client.start_collection, first)
        with pytest.raises(RolloutNodeError, match="half-2of2"):
            await asyncio.wait_for(asyncio.to_thread(source.read, request), DEADLINE_S / 2)


async def test_a_node_that_is_gone_is_named_and_a_stop_ends_the_wait(policy, tmp_path):
    async with local_node(policy, tmp_path / "west") as west:
        with pytest.raises(NodeUnreachable, match=r"127\.0\.0\.1:9"):
            await asyncio.to_thread(several([west.url, "http://127.0.0.1:9"], start_deadline_s=2.0).wait_ready)
        with pytest.raises(StopRequested):
            await asyncio.to_thread(several([west.url, "http://127.0.0.1:9"], stop_requested=lambda: True).wait_ready)
