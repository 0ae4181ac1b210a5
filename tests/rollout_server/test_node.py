import asyncio
import errno
import json
import os
from collections import Counter

import pytest

from agent_environments.counter import CounterEnvironment, CounterPool
from loop_formats.collection_request import Limits
from loop_formats.rollout import Rollout
from loop_formats.schema import ConfigError
from rollout_server.client import CollectionFailed, RolloutNodeError
from support.counter_node import counter_request, local_node, read_all
from support.scripted_vllm import expected_logprob
from support.waiting import pass_time, wait_until


def check(rollout, vllm):
    """Mask, log-probs and ids of a rollout against what the fake server was asked and claimed."""
    rollout.validate()
    for position, sampled in enumerate(rollout.mask):
        assert rollout.sampler_logprobs[position] == (expected_logprob(position) if sampled else 0.0)
    served = [r["token_ids"] for r in vllm.requests if r["request_id"].startswith(rollout.rollout_id)]
    for turn in rollout.turns:
        assert rollout.token_ids[: turn.start] in served, "the trained sequence is the served sequence"


async def test_collects_all_rollouts_of_all_tasks(running):
    rollouts, end = await running.collect(counter_request())
    assert end.reason == "complete"
    assert Counter(rollout.task_id for rollout in rollouts) == {"reach3_1": 4, "reach5_1": 4, "reach8_1": 4}
    assert len({rollout.rollout_id for rollout in rollouts}) == 12
    for rollout in rollouts:
        check(rollout, running.vllm)
    assert {rollout.end_reason for rollout in rollouts} == {"completed", "turn_limit"}
    assert all(rollout.dataset == "counter" and rollout.policy_versions == [0] for rollout in rollouts)


async def test_log_is_json_lines_of_rollouts(running):
    rollouts, _ = await running.collect(counter_request())
    lines = (running.node.root / "collections" / "c1.jsonl").read_text().splitlines()
    assert [Rollout.from_dict(json.loads(line)) for line in lines] == rollouts


async def test_same_seed_same_rollouts(running):
    first, _ = await running.collect(counter_request("a", seed=7))
    again, _ = await running.collect(counter_request("b", seed=7))
    other, _ = await running.collect(counter_request("c", seed=8))

    def ids(rollouts):
        return {(rollout.task_id, rollout.index): rollout.token_ids for rollout in rollouts}

    assert ids(first) == ids(again)
    assert ids(first) != ids(other)


async def test_capped_turn_is_closed_by_a_token_nobody_trains_on(running):
    limits = Limits(max_turns=3, max_tokens_per_turn=2, max_context=1000)
    rollouts, _ = await running.collect(counter_request(rollouts_per_task=1, limits=limits))
    im_end = running.node.tokens.turn_end
    assert rollouts
    for rollout in rollouts:
        check(rollout, running.vllm)
        assert rollout.end_reason == "turn_limit"
        assert [turn.finish_reason for turn in rollout.turns] == ["length"] * 3
        for turn in rollout.turns[:-1]:
            assert turn.end - turn.start == 2
            assert rollout.token_ids[turn.end] == im_end
            assert not rollout.mask[turn.end]


async def test_an_agent_whose_actions_take_too_long_is_graded_at_its_deadline(running, monkeypatch):
    running.vllm.speak = lambda rng: "```python\nadd(1)\n```"
    step, acted = CounterEnvironment.step, set()

    async def hangs_the_second_time(environment, action):
        if environment in acted:
            await asyncio.Event().wait()
        acted.add(environment)
        return await step(environment, action)

    monkeypatch.setattr(CounterEnvironment, "step", hangs_the_second_time)
    limits = Limits(max_turns=40, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=5.0)
    rollouts, end = await running.collect(counter_request(rollouts_per_task=1, limits=limits))
    assert end.reason == "complete"
    assert {rollout.end_reason for rollout in rollouts} == {"deadline"}
    assert [[turn.failed for turn in rollout.turns] for rollout in rollouts] == [[False, True]] * 3


async def test_turns_that_wait_for_a_busy_server_end_no_episode(running, monkeypatch):
    """Each for longer than the agent's own time: the first was a server error, a later one ended the episode."""
    sample = running.vllm.sample

    async def slowly(body):
        await pass_time(700.0)
        return await sample(body)

    monkeypatch.setattr(running.vllm, "sample", slowly)
    running.vllm.speak = lambda rng: "```python\nadd(1)\n```"
    limits = Limits(max_turns=3, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=600.0)
    request = counter_request(tasks=["reach3_1"], rollouts_per_task=1, limits=limits)
    rollouts, end = await running.collect(request)
    assert (end.reason, end.failures) == ("complete", {})
    assert [(rollout.end_reason, len(rollout.turns)) for rollout in rollouts] == [("turn_limit", 3)]


async def test_early_stop_aborts_and_counts_the_rest(running):
    """Two of twelve episodes never end: with three quarters asked for, nobody waits for them."""
    stuck = ("c1/reach3_1/0.", "c1/reach5_1/1.")
    running.vllm.delay = lambda body: 600.0 if body["request_id"].startswith(stuck) else 0.01
    rollouts, end = await running.collect(counter_request(min_rollouts_per_task=2, min_rollouts_fraction=0.75))
    assert end.reason == "early_stop"
    assert 9 <= len(rollouts) == end.finished <= 10
    assert min(Counter(rollout.task_id for rollout in rollouts).values()) >= 2
    assert end.dropped >= 1
    await wait_until(lambda: running.vllm.aborted >= 2)


async def test_a_collection_is_ended_early_once_every_task_has_its_floor(running):
    """Whoever asked says when; what ran until then is told, and what was given up by how long it had run."""
    floor_is_there = False
    running.vllm.answers = lambda body: floor_is_there or "/0." in body["request_id"]
    running.vllm.delay = lambda body: 600.0 if "/3." in body["request_id"] else 0.01
    await running.call(running.client.start_collection, counter_request(min_rollouts_per_task=2))
    await wait_until(lambda: running.node.collections()[0]["finished"] == 3)
    with pytest.raises(RolloutNodeError, match="c1 has a task below its floor of 2") as refused:
        await running.call(running.client.end_early, "c1")
    assert refused.value.status == 409
    (row,) = await running.call(running.client.collections)
    assert (row["id"], row["state"], row["lost"]) == ("c1", "running", 0)
    assert row["seconds"] > 0
    floor_is_there = True
    await wait_until(lambda: running.node.collections()[0]["finished"] == 9)
    assert await running.call(running.client.end_early, "c1") == "early_stop"
    rollouts, end = await running.call(read_all, running.client, "c1")
    assert (len(rollouts), end.reason, end.dropped, len(end.dropped_seconds)) == (9, "early_stop", 3, 3)
    assert min(end.dropped_seconds) > 0
    assert await running.call(running.client.end_early, "c1") == "early_stop"


async def test_single_failures_are_recorded_and_replaced(running):
    """Every first attempt of one task's rollouts meets a poisoned log-prob."""
    asked = Counter()

    def poison(position):
        asked[position] += 1
        return -9999.0 if sum(asked.values()) == 5 else expected_logprob(position)

    running.vllm.logprob = poison
    rollouts, end = await running.collect(counter_request())
    assert end.reason == "complete"
    assert len(rollouts) == 12
    assert end.failures == {"bad_logprob": 1}
    records = [json.loads(line) for line in (running.node.root / "collections" / "c1.meta.jsonl").open()]
    failure = next(record["failure"] for record in records if "failure" in record)
    assert failure["reason"] == "bad_logprob"
    assert Counter(rollout.attempt for rollout in rollouts) == {0: 11, 1: 1}


async def test_too_many_lost_fail_with_one_error_and_are_attempted_anew_when_asked_again(running):
    running.vllm.fault = lambda body: 400
    request = counter_request(rollouts_per_task=4, max_lost=1)
    with pytest.raises(
        CollectionFailed, match=r"2 of 12 .* lost \(request_refused 2\).*400.*, where 1 may be"
    ) as raised:
        await running.call(collect_or_raise, running.client, request)
    assert raised.value.end.reason == "failed"
    records = [json.loads(line) for line in (running.node.root / "collections" / "c1.meta.jsonl").open()]
    tried = {record["failure"]["attempt"] for record in records if "failure" in record}
    assert tried == {0}, "what every try would repeat is tried once"
    assert "\n" not in str(raised.value)
    running.vllm.fault = lambda body: None
    rollouts, end = await running.collect(request)
    assert (end.reason, len(rollouts), end.lost) == ("complete", 12, [])


def asks_for(node, text):
    """Whether a request's prompt holds ``text``."""
    wanted = node.tokens.encode_text(text)
    return lambda ids: any(ids[i : i + len(wanted)] == wanted for i in range(len(ids)))


async def test_a_lost_rollout_is_told_and_stays_lost_over_a_restart(policy, tmp_path):
    """The others are played to their end; one that is asked for again after a cancellation is attempted anew."""
    async with local_node(policy, tmp_path / "node") as local:
        hopeless, held = (asks_for(local.node, f"from 0 to {target}") for target in (8, 5))
        local.vllm.fault = lambda body: 400 if hopeless(body["token_ids"]) else None
        local.vllm.answers = lambda body: not held(body["token_ids"])
        request = counter_request(rollouts_per_task=2)
        await local.call(local.client.start_collection, request)
        run = await local.node.collection("c1")
        await wait_until(lambda: len(run.collector.lost) == 2)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        rollouts, end = await local.collect(request)
        assert (end.reason, len(rollouts), end.failures) == ("complete", 4, {})
        assert {(lost.task_id, lost.index, lost.reason) for lost in end.lost} == {
            ("reach8_1", index, "request_refused") for index in range(2)
        }
        assert all("400" in lost.message for lost in end.lost)
        assert await local.call(local.client.start_collection, request) == "complete", (
            "a resumed run finds it as it was"
        )
        assert await local.call(local.client.cancel, "c1") == "cancelled"
        rollouts, end = await local.collect(request)
        assert (end.reason, len(rollouts), end.lost) == ("complete", 6, [])


def collect_or_raise(client, request):
    client.start_collection(request)
    return list(client.rollouts(request.id))


async def test_idempotent_by_id(running):
    request = counter_request()
    first, _ = await running.collect(request)
    asked = len(running.vllm.requests)
    again, end = await running.collect(request)
    assert again == first
    assert end.reason == "complete"
    assert len(running.vllm.requests) == asked, "nothing was sampled twice"
    with pytest.raises(RolloutNodeError, match="another request") as refused:
        await running.call(running.client.start_collection, counter_request(seed=99))
    assert refused.value.status == 409


async def test_reading_from_a_cursor(running):
    rollouts, _ = await running.collect(counter_request())
    rest, _ = await running.call(read_all, running.client, "c1", 7)
    assert rest == rollouts[7:]
    with pytest.raises(RolloutNodeError, match="not a cursor"):
        await running.call(read_all, running.client, "c1", 13)


async def test_two_collections_share_the_slots_in_order(running):
    running.vllm.delay = lambda body: 0.02
    for name in ("a", "b"):
        await running.call(running.client.start_collection, counter_request(name))
    results = [await running.call(read_all, running.client, name) for name in ("a", "b")]
    assert [end.reason for _, end in results] == ["complete", "complete"]
    assert max(rollout.started_at for rollout in results[0][0]) < max(r.started_at for r in results[1][0])


async def test_latest_mode_records_the_version_of_every_turn(running, policy):
    running.vllm.speak = lambda rng: "```python\nadd(1)\n```"
    published = False
    running.vllm.answers = lambda body: published or running.vllm.turn(body) == 1
    request = counter_request(policy_mode="latest", rollouts_per_task=1)
    collecting = asyncio.create_task(running.collect(request))
    await wait_until(lambda: len(running.vllm.requests) == 6)  # three at their second turn
    await running.call(running.client.publish_policy, 1, policy / "adapter1")
    published = True
    rollouts, _ = await collecting
    for rollout in rollouts:
        versions = [turn.policy_version for turn in rollout.turns]
        assert versions == sorted(versions)
        assert rollout.policy_versions == [0, 1]


async def test_pinned_collection_outlives_a_newer_version(running, policy):
    retired = False
    running.vllm.answers = lambda body: retired
    collecting = asyncio.create_task(running.collect(counter_request()))
    await wait_until(lambda: running.vllm.requests)
    await running.call(running.client.publish_policy, 1, policy / "adapter1")
    await running.call(running.client.retire_policy, 0)
    retired = True
    rollouts, end = await collecting
    assert end.reason == "complete"
    assert {tuple(rollout.policy_versions) for rollout in rollouts} == {(0,)}
    assert running.node.policies.versions() == [1]
    await wait_until(lambda: len(running.vllm.loaded) == 1)


async def test_cancel_keeps_what_is_finished(running):
    running.vllm.delay = lambda body: 600.0 if "/0." in body["request_id"] else 0.02
    await running.call(running.client.start_collection, counter_request(rollouts_per_task=20))
    await wait_until(lambda: running.node.status()["collections"][0]["finished"] >= 3)
    await running.call(running.client.cancel, "c1")
    with pytest.raises(CollectionFailed, match="cancelled"):
        await running.call(lambda: list(running.client.rollouts("c1")))
    assert running.node.status()["running"] == 0


async def test_cancelled_as_it_is_taken_up_again_it_gives_its_slots_and_its_version_back(policy, tmp_path):
    """The request that takes it up cancels it, before one of its episodes has made a step."""
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.answers = lambda body: False
        await local.call(local.client.start_collection, counter_request())
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        await local.call(local.client.cancel, "c1")
        run = await local.node.collection("c1")
        await wait_until(lambda: run.idle)
        assert run.episodes_running == 0
        assert local.node.policies._live[0].references == 0
        _, end = await local.collect(counter_request("c2"))
        assert end.reason == "complete"


async def test_interrupted_collection_is_taken_up_again(policy, tmp_path):
    """The node stops in mid-collection; another one on the same root finishes it without repeating a rollout."""
    request = counter_request(rollouts_per_task=8)
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.delay = lambda body: 0.03
        await local.call(local.client.start_collection, request)
        await wait_until(lambda: local.node.status()["collections"][0]["finished"] >= 5)
    before = (tmp_path / "node" / "collections" / "c1.jsonl").read_bytes()
    torn = before + b'{"rollout_id":"c1/reach'
    (tmp_path / "node" / "collections" / "c1.jsonl").write_bytes(torn)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        assert local.node.policies.versions() == [0], "the policy came back from disk"
        rollouts, end = await local.call(read_all, local.client, "c1")
        assert end.reason == "complete"
        assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == {
            (task, index): 1 for task in request.tasks for index in range(8)
        }
        assert (tmp_path / "node" / "collections" / "c1.jsonl").read_bytes().startswith(before)


class WithATypo(CounterEnvironment):
    async def step(self, action):
        return [][1]


class PoolWithATypo(CounterPool):
    async def acquire(self, episode_id):
        await super().acquire(episode_id)
        return WithATypo(self)


async def test_an_environment_that_breaks_is_in_every_record_and_counted(policy, tmp_path):
    typo = f"{__file__}:{WithATypo.step.__code__.co_firstlineno + 1}"
    environment = {"name": f"{__name__}:PoolWithATypo"}
    async with local_node(policy, tmp_path / "node", environment=environment) as local:
        rollouts, end = await local.collect(counter_request())
        assert (end.reason, len(rollouts)) == ("complete", 12)
        broke = {"where": "step", "what": f"IndexError: list index out of range ({typo})"}
        assert all(rollout.broke == broke for rollout in rollouts)
        assert b"rollout_broken_episodes_total 12.0" in local.node.metrics.render()


class EndsLikeACancelledAttempt(CounterPool):
    """Its places are taken in the task of the attempt itself."""

    async def acquire(self, episode_id):
        if episode_id.endswith(".0"):
            if "reach3_1" in episode_id:
                raise GeneratorExit
            asyncio.current_task().cancel()
        return await super().acquire(episode_id)


async def test_an_attempt_that_nobody_ended_leaves_a_trace(policy, tmp_path):
    environment = {"name": f"{__name__}:EndsLikeACancelledAttempt"}
    async with local_node(policy, tmp_path / "node", environment=environment) as local:
        rollouts, end = await local.collect(counter_request())
        assert (end.reason, len(rollouts), end.failures) == ("complete", 12, {"environment_error": 12})


async def test_second_node_on_the_same_root_is_refused(running, policy):
    with pytest.raises(ConfigError, match="another rollout node is using"):
        async with local_node(policy, running.node.root):
            pass


async def test_a_root_on_a_file_system_without_locks_is_refused_in_the_systems_words(policy, tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match="cannot be locked: Function not implemented; mount "):
        async with local_node(policy, tmp_path / "node"):
            pass


async def test_end_survives_a_restart(policy, tmp_path):
    async with local_node(policy, tmp_path / "node") as local:
        rollouts, end = await local.collect(counter_request())
    async with local_node(policy, tmp_path / "node") as local:
        again, same_end = await local.call(read_all, local.client, "c1")
        assert (again, same_end) == (rollouts, end)
        assert not local.vllm.requests


async def test_more_collections_than_are_open_at_once_come_one_after_the_other(running, monkeypatch):
    monkeypatch.setattr("rollout_server.node.MAX_OPEN_COLLECTIONS", 2)
    monkeypatch.setattr("rollout_server.client.RETRY_PAUSE_S", 0.01)
    requests = [counter_request(f"c{number}") for number in range(8)]
    for request in requests:
        await running.call(running.client.start_collection, request)
    for request in requests:
        rollouts, end = await running.call(read_all, running.client, request.id)
        assert (len(rollouts), end.reason) == (12, "complete")
