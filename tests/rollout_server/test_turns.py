"""Servers whose GPU is a trainer's too: asleep while it is the trainer's turn, awake and proven when it is theirs."""

import asyncio
from collections import Counter

import pytest

from rollout_server import node as rollout_node
from rollout_server.client import NodeUnreachable, RolloutClient, RolloutNodeError
from rollout_server.inference import server as vllm_server
from rollout_server.inference import server_group
from rollout_server.inference.server_group import ServerGroup
from rollout_server.node import Node
from rollout_server.policies import store
from rollout_server.policies.store import PolicyStore
from support import fake_vllm
from support.counter_node import TOKEN, counter_request, local_node
from support.fake_vllm import prompt_logprob
from support.random_policy import write_adapter
from support.scripted_vllm import ScriptedVllm
from support.waiting import DEADLINE_S, wait_until

SHARED = {"share": "trainer"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm_server, "POLL_S", 0.05)
    monkeypatch.setattr(server_group, "BACK_OFF_S", (0.05, 0.1))
    monkeypatch.setattr(store, "READY_TIMEOUT_S", 0.2)


@pytest.fixture
async def shared(policy, tmp_path):
    async with local_node(policy, tmp_path / "node", servers=SHARED) as local:
        yield local


def impatient(local):
    """A client that asks once."""
    return RolloutClient(local.url, TOKEN, reconnect_s=0.0)


def ids(rollouts):
    return sorted((rollout.task_id, rollout.index, rollout.token_ids) for rollout in rollouts)


async def undisturbed(policy, folder):
    async with local_node(policy, folder) as local:
        return ids((await local.collect(counter_request()))[0])


async def publish_proven(local, policy, version=1, seed=1):
    """Publish another version with a canary; returns what the fake answers under its weights, and its name."""
    folder = policy.parent / f"seed{seed}"
    write_adapter(folder, seed=seed)
    value = prompt_logprob(folder)
    canary = {"token_ids": [5, 6, 7], "positions": [1, 2], "logprobs": [value, value], "tolerance": 1e-3}
    info = await local.call(local.client.publish_policy, version, folder, canary)
    return value, info.name


async def test_a_node_asleep_begins_no_episode_and_goes_on_when_it_wakes(shared, policy, tmp_path):
    await shared.call(shared.client.sleep)
    assert shared.vllm.asleep
    assert [server["state"] for server in shared.node.status()["servers"]] == ["asleep"]
    collecting = asyncio.create_task(shared.collect(counter_request()))
    await wait_until(lambda: shared.node.status()["waiting"])
    assert shared.node.status()["running"] == 0, "time that an episode waits asleep is none of its own"
    await shared.call(shared.client.wake)
    rollouts, end = await collecting
    assert end.reason == "complete"
    assert ids(rollouts) == await undisturbed(policy, tmp_path / "other")
    assert "asked while asleep" not in dict(shared.vllm.log)


async def test_both_calls_may_be_repeated(shared):
    for _ in range(2):
        await shared.call(shared.client.sleep)
    for _ in range(2):
        await shared.call(shared.client.wake)
    assert [what for what, _ in shared.vllm.log if what in ("sleep", "wake")] == ["sleep", "wake"]
    assert dict(shared.vllm.log)["sleep"] == "1", "level 2 loses the weights"


async def test_turns_under_way_are_waited_for(shared, policy, tmp_path):
    shared.vllm.answers = lambda body: False
    collecting = asyncio.create_task(shared.collect(counter_request()))
    await wait_until(lambda: len(shared.vllm.requests) == 6)
    sleeping = asyncio.create_task(shared.call(shared.client.sleep))
    await wait_until(lambda: shared.node.servers.resting)
    assert not shared.vllm.asleep
    shared.vllm.answers = lambda body: True
    await sleeping
    asked = len(shared.vllm.requests)
    assert asked == 6, "the next turns wait"
    await shared.call(shared.client.wake)
    rollouts, _ = await collecting
    assert ids(rollouts) == await undisturbed(policy, tmp_path / "other")
    assert "asked while asleep" not in dict(shared.vllm.log)


async def test_a_turn_that_takes_too_long_is_sampled_again(shared, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_node, "DRAIN_S", 0.05)
    shared.vllm.answers = lambda body: False
    collecting = asyncio.create_task(shared.collect(counter_request()))
    await wait_until(lambda: len(shared.vllm.requests) == 6)
    await shared.call(shared.client.sleep)
    await wait_until(lambda: shared.vllm.aborted == 6)
    shared.vllm.answers = lambda body: True
    await shared.call(shared.client.wake)
    rollouts, end = await collecting
    assert (end.reason, end.error) == ("complete", None)
    assert ids(rollouts) == await undisturbed(policy, tmp_path / "other")


def forgotten(vllm, name):
    vllm.loaded.clear()


def swapped(vllm, name):
    vllm.loaded[name] = vllm.loaded[next(other for other in vllm.loaded if other != name)]


def without_effect(vllm, name):
    vllm.loaded[name] = None  # as the base model


@pytest.mark.parametrize("forgets", [forgotten, swapped, without_effect])
async def test_what_a_wake_forgets_is_there_again_before_a_token_is_sampled(shared, policy, forgets):
    value, name = await publish_proven(shared, policy)
    await shared.call(shared.client.sleep)
    shared.vllm.forgets = lambda: forgets(shared.vllm, name)
    collecting = asyncio.create_task(shared.collect(counter_request(policy_version=1)))
    await wait_until(lambda: shared.node.status()["waiting"])
    seen = len(shared.vllm.seen)
    await shared.call(shared.client.wake)
    await collecting
    asked = shared.vllm.seen[seen:]
    first_turn = next(i for i, body in enumerate(asked) if "prompt_logprobs" not in body["sampling_params"])
    assert name in [body["model"] for body in asked[:first_turn]], "the canary of the newest version spoke first"
    assert prompt_logprob(shared.vllm.loaded[name]) == value


@pytest.mark.parametrize("mode", ["poisoned", "other weights", "refuse wake", "only says it is awake", "refuse load"])
async def test_a_server_that_wakes_wrong_samples_nothing_until_it_is_right(shared, policy, mode, monkeypatch):
    value, _ = await publish_proven(shared, policy)
    await shared.call(shared.client.sleep)
    right = fake_vllm.prompt_logprob
    if mode == "other weights":
        monkeypatch.setattr(fake_vllm, "prompt_logprob", lambda folder: value - 0.5)
    shared.vllm.mode = mode
    collecting = asyncio.create_task(shared.collect(counter_request(policy_version=1)))
    turns = len(shared.vllm.requests)
    with pytest.raises(NodeUnreachable, match=r"no vLLM server is ready after 0.2 s: vllm-0 "):
        await shared.call(impatient(shared).wake)
    assert len(shared.vllm.requests) == turns
    assert "vllm-0" in shared.node.servers.servers[0].last_error
    monkeypatch.setattr(fake_vllm, "prompt_logprob", right)
    shared.vllm.mode = "well"
    await shared.call(shared.client.wake)
    _, end = await collecting
    assert end.reason == "complete"
    assert "asked while asleep" not in dict(shared.vllm.log)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("refuse sleep", "refuses /sleep: HTTP 404 .* start it with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"),
        ("only says it sleeps", "answered /sleep and did not do it"),
        ("never sleeps", "does not fall asleep"),
    ],
)
async def test_a_server_elsewhere_that_does_not_sleep_is_told_and_samples_on(shared, mode, said, monkeypatch):
    monkeypatch.setattr(server_group, "SWAP_S", 0.5)
    shared.vllm.mode = mode
    with pytest.raises(NodeUnreachable, match=rf"vllm-0 \(http://\S+\) {said}"):
        await shared.call(impatient(shared).sleep)
    monkeypatch.setattr(server_group, "SWAP_S", DEADLINE_S)
    shared.vllm.mode = "well"
    await shared.call(shared.client.wake)
    _, end = await shared.collect(counter_request())
    assert end.reason == "complete"


@pytest.mark.parametrize("ended", [False, True])
async def test_a_server_elsewhere_that_is_not_reached_is_asked_again_or_has_ended_and_holds_no_gpu(shared, ended):
    server = shared.node.servers.servers[0]
    shared.node.servers.rest()
    shared.node.servers.condemn(server, "did not answer")
    await wait_until(lambda: server.state == "waiting")
    if ended:
        await shared.vllm.stop()
        await shared.call(impatient(shared).sleep)
        return
    assert not shared.vllm.asleep
    await shared.call(shared.client.sleep)
    assert shared.vllm.asleep
    await shared.call(shared.client.wake)
    await wait_until(lambda: shared.node.servers.ready)
    _, end = await shared.collect(counter_request())
    assert end.reason == "complete"


async def test_a_publication_waits_for_the_trainers_turn_to_end(shared, policy):
    await shared.call(shared.client.sleep)
    publishing = asyncio.create_task(publish_proven(shared, policy))
    await asyncio.sleep(0)
    await shared.call(shared.client.wake)
    await publishing
    assert shared.node.policies.latest() == 1
    assert "asked while asleep" not in dict(shared.vllm.log)


async def test_only_a_node_that_shares_takes_turns(running):
    for call in (running.client.sleep, running.client.wake):
        with pytest.raises(RolloutNodeError, match=r"share no GPU with a trainer; set servers.share") as refused:
            await running.call(call)
        assert refused.value.status == 409


SEAMS = {
    "noted": (PolicyStore, "settled"),
    "before a sleep": (ServerGroup, "sleep"),
    "in a sleep": (ServerGroup, "_put_to_sleep"),
    "asleep": None,
    "before a wake": (ServerGroup, "wake"),
    "in a wake": (ServerGroup, "_wake"),
    "before its canary": (ServerGroup, "_prepare"),
    "before it counts as awake": (PolicyStore, "wait_for_server"),
}


@pytest.mark.parametrize("dies", ["node", "trainer"])
@pytest.mark.parametrize("seam", SEAMS)
async def test_whatever_ends_between_the_two_nothing_is_lost_or_double(policy, tmp_path, monkeypatch, seam, dies):
    """Nothing that comes after the seam happens, as in a process that is killed there."""
    root, reached = tmp_path / "node", asyncio.Event()

    async def never(*_):
        reached.set()
        await asyncio.Event().wait()

    async with local_node(policy, root, servers=SHARED) as first:
        rollouts, _ = await first.collect(counter_request())
        if SEAMS[seam] is None:
            await first.node.sleep()
        else:
            with monkeypatch.context() as patched:
                patched.setattr(*SEAMS[seam], never)
                turn = asyncio.create_task(take_turn(first.node))
                await asyncio.wait_for(reached.wait(), DEADLINE_S)
                turn.cancel()
                await asyncio.gather(turn, return_exceptions=True)
        if dies == "trainer":
            # One that begins anew asks for its turn, and ends it when it has set itself up.
            await first.call(first.client.sleep)
            await first.call(first.client.wake)
            await check_goes_on(first, rollouts)
    if dies == "node":
        slept = first.vllm.asleep
        monkeypatch.setattr("support.counter_node.ScriptedVllm", lambda tokens: vllm_that_sleeps(tokens, slept))
        monkeypatch.setattr(Node, "start", start_beside_a_trainer)
        async with local_node(policy, root, publish=False, servers=SHARED) as second:
            await check_goes_on(second, rollouts)


async def take_turn(node):
    await node.sleep()
    await node.wake()


def vllm_that_sleeps(tokens, slept):
    vllm = ScriptedVllm(tokens)
    vllm.asleep = slept
    return vllm


async def start_beside_a_trainer(node, start=Node.start):
    client = RolloutClient(node.endpoint.sessions.base_url.removesuffix("/v1"), TOKEN)
    starting = asyncio.create_task(start(node))
    await asyncio.to_thread(client.sleep)
    assert not node.servers.ready
    assert await node.servers.servers[0]._is_asleep(), "the trainer takes the GPU now"
    await asyncio.to_thread(client.wake)
    await starting


async def check_goes_on(local, rollouts):
    again, end = await local.collect(counter_request())
    assert (end.reason, ids(again)) == ("complete", ids(rollouts))
    more, _ = await local.collect(counter_request("c2"))
    assert Counter(rollout.task_id for rollout in more) == dict.fromkeys(("reach3_1", "reach5_1", "reach8_1"), 4)
    assert "asked while asleep" not in dict(local.vllm.log)


async def test_a_restarted_node_leaves_the_gpu_to_the_trainer_whose_turn_it_is(policy, tmp_path, monkeypatch):
    async with local_node(policy, tmp_path / "node", servers=SHARED) as first:
        await first.call(first.client.sleep)
    told = []

    async def start_and_look(node, start=Node.start):
        starting = asyncio.create_task(start(node))
        await wait_until(lambda: any("waits for the trainer" in line for line in node.waits_for()))
        told.append(node.health())
        assert [server.state for server in node.servers.servers] == ["waiting"]
        await node.wake()
        await starting

    monkeypatch.setattr(Node, "start", start_and_look)
    async with local_node(policy, tmp_path / "node", publish=False, servers=SHARED) as second:
        assert second.node.policies.versions() == [0]
    assert told[0]["status"] == "starting"
    assert "vllm-0 waits for the trainer's turn to end (POST /v1/servers/wake), for " in told[0]["waits_for"][0]
