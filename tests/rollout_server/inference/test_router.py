import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference import router as router_module
from rollout_server.inference import server as vllm_server
from rollout_server.inference import server_group
from rollout_server.inference.router import BadLogprob, RequestRefused, Router, ServerUnavailable
from rollout_server.inference.server_group import ServerGroup
from rollout_server.inference.server_metrics import Load
from support.fake_vllm import FakeVllm
from support.waiting import DEADLINE_S, wait_until

POLICY = "policy-v0001-00000000"


class Setup:
    def __init__(self, fakes, group, router):
        self.fakes, self.group, self.router = fakes, group, router

    async def generate(self, episode_id="ep", token_ids=(3, 4, 5), seconds=DEADLINE_S, **changes):
        request = {
            "episode_id": episode_id,
            "token_ids": list(token_ids),
            "model": POLICY,
            "max_tokens": 2,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "seed": 11,
            "stop_token_ids": (7, 8),
            "deadline": time.monotonic() + seconds,
        }
        return await self.router.generate(**{**request, **changes})

    def fake_of(self, name):
        return self.fakes[int(name.removeprefix("vllm-"))]

    async def kill_engines(self):
        """Every server's; returns when none is ready."""
        for fake in self.fakes:
            fake.mode = "dead engine"
        await wait_until(lambda: not self.group.ready)

    def other(self, name):
        return next(server.name for server in self.group.servers if server.name != name)


@pytest.fixture
async def setup(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "POLL_S", 0.05)
    monkeypatch.setattr(server_group, "BACK_OFF_S", (0.05, 0.1))
    monkeypatch.setattr(router_module, "RETRY_PAUSE_S", 0.02)
    fakes = [FakeVllm() for _ in range(2)]
    for fake in fakes:
        fake.loaded[POLICY] = tmp_path
    config = ServersConfig(urls=[await fake.start() for fake in fakes], max_num_seqs=8, start_timeout_s=DEADLINE_S)
    group = ServerGroup(ModelConfig(path="unused"), config, tmp_path)
    await group.start()
    async with Router(group, config.max_num_seqs) as router:
        yield Setup(fakes, group, router)
    await group.stop()
    for fake in fakes:
        await fake.stop()


async def test_request_and_answer_are_token_ids(setup):
    generation = await setup.generate(token_ids=[3, 4, 5], max_tokens=2)
    assert generation.token_ids == [12, 13]
    assert generation.logprobs == [-0.5, -0.5]
    assert (generation.finish_reason, generation.cached_tokens, generation.server) == ("length", 1, "vllm-0")
    sent = setup.fakes[0].seen[0]
    assert sent["token_ids"] == [3, 4, 5]
    assert sent["model"] == POLICY
    assert sent["request_id"].startswith("ep-")
    assert sent["sampling_params"] == {
        "max_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 11,
        "logprobs": 0,
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        "stop": [],
        "detokenize": False,
        "skip_special_tokens": False,
    }


async def test_new_episodes_fill_the_servers_evenly_and_old_ones_stay(setup):
    first = {name: (await setup.generate(name)).server for name in "abcdef"}
    assert sorted(first.values()).count("vllm-0") == 3
    again = {name: (await setup.generate(name)).server for name in "fabced"}
    assert again == first


async def test_room_decides_and_not_the_turn(setup):
    full, roomy = setup.group.servers
    full.load = replace(Load(), kv_usage=0.9)
    setup.fakes[0].load_metrics["kv_cache_usage_perc"] = 0.9
    assert {(await setup.generate(f"ep{i}")).server for i in range(6)} == {roomy.name}
    setup.fakes[0].load_metrics["kv_cache_usage_perc"] = 0.0
    setup.fakes[1].load_metrics["num_requests_waiting"] = 4.0
    await wait_until(lambda: full.load.kv_usage == 0.0 and roomy.load.waiting == 4.0)
    assert (await setup.generate("new")).server == full.name


@pytest.mark.parametrize(
    ("load", "episodes", "apart"),
    [({}, 8, 0), ({"num_requests_waiting": 1.0}, 2, 1), ({"kv_cache_usage_perc": 0.95}, 2, 1), ({}, 10, 2)],
)
async def test_a_tasks_rollouts_go_to_one_server_while_it_has_room(setup, load, episodes, apart):
    """Of 8 sequences, with a second server that is empty throughout."""
    home = setup.group.servers[0]
    assert (await setup.generate("c-i0001/a/b/0.0")).server == home.name
    setup.fakes[0].load_metrics |= load
    await wait_until(lambda: (home.load.waiting, home.load.kv_usage) == tuple(setup.fakes[0].load_metrics.values())[1:])
    went = [(await setup.generate(f"c-i0001/a/b/{index}.0")).server for index in range(1, episodes)]
    assert went.count(setup.other(home.name)) == apart
    other_collection = (await setup.generate("c-i0002/a/b/0.0")).server
    assert other_collection == setup.other(home.name), "another version has nothing cached, and there is most room"


async def test_released_episode_gives_its_place_back(setup):
    for name in "abc":
        await setup.generate(name)
    for name in "abc":
        setup.router.release(name)
    setup.router.release("never seen")
    assert all(setup.router.crowding(server) == 0 for server in setup.group.servers)


@pytest.mark.parametrize("mode", ["error", "hang up", "cut short", "abort"])
async def test_failing_server_is_left_with_the_same_ids(setup, mode):
    before = (await setup.generate("ep")).server
    setup.fake_of(before).mode = mode
    generation = await setup.generate("ep", token_ids=[9, 9, 9, 9])
    assert generation.server == setup.other(before)
    assert generation.token_ids == [36, 37]
    asked = [fake.seen[-1] for fake in (setup.fake_of(before), setup.fake_of(generation.server))]
    assert asked[0]["token_ids"] == asked[1]["token_ids"] == [9, 9, 9, 9]
    assert asked[0]["sampling_params"] == asked[1]["sampling_params"]
    assert asked[0]["request_id"] != asked[1]["request_id"]
    assert setup.router.counters.moved_episodes == 1
    setup.fake_of(before).mode = "well"
    assert (await setup.generate("ep")).server == generation.server, "it stays where it went"


async def test_all_servers_failing_ends_after_the_attempts(setup):
    for fake in setup.fakes:
        fake.mode = "error"
    with pytest.raises(
        ServerUnavailable, match=r"gave up after 4 attempts; last failure: vllm-\d: HTTP 500.*EngineCore"
    ):
        await setup.generate()
    assert sum(len(fake.seen) for fake in setup.fakes) == 4


async def test_waits_for_a_server_to_come_back(setup):
    await setup.kill_engines()
    task = asyncio.create_task(setup.generate())
    await asyncio.sleep(0.1)
    assert not task.done()
    setup.fakes[1].mode = "well"
    assert (await task).server == "vllm-1"


async def test_deadline_holds_whatever_the_servers_do(setup):
    for fake in setup.fakes:
        fake.mode = "hang"
    with pytest.raises(ServerUnavailable, match=r"ep: no answer after \d+\.\d s$"):
        await setup.generate(seconds=0.2)
    await setup.kill_engines()
    with pytest.raises(ServerUnavailable, match="no vLLM server is ready"):
        await setup.generate(seconds=0.2)


async def test_a_busy_server_is_waited_for_and_one_that_lost_the_request_is_not(setup, monkeypatch):
    monkeypatch.setattr(router_module, "LOST_S", 0.3)
    monkeypatch.setattr(router_module, "POLL_S", 0.02)
    busy, other = setup.fakes
    busy.mode, busy.load_metrics["num_requests_running"] = "hang", 1.0
    await wait_until(lambda: setup.group.servers[0].load.running)
    setup.router._pinned["ep"] = setup.group.servers[0]
    task = asyncio.create_task(setup.generate())
    await wait_until(lambda: busy.seen)
    scrapes = busy.scrapes
    await wait_until(lambda: busy.scrapes > scrapes + 20)  # a second: three times as long as an idle one would get
    assert not task.done()
    busy.load_metrics["num_requests_running"] = 0.0
    assert (await task).server == "vllm-1"
    assert len(other.seen) == 1
    await wait_until(lambda: busy.aborted == 1)


async def test_a_request_leaves_a_server_that_is_given_up_though_its_connection_stays(setup, monkeypatch):
    """One that runs elsewhere is not ended by us."""
    monkeypatch.setattr(router_module, "POLL_S", 0.02)
    setup.fakes[0].mode = "hang"
    setup.router._pinned["ep"] = setup.group.servers[0]
    task = asyncio.create_task(setup.generate())
    await wait_until(lambda: setup.fakes[0].seen)
    setup.group.condemn(setup.group.servers[0], "it answers nonsense")
    assert (await task).server == "vllm-1"
    await wait_until(lambda: setup.fakes[0].aborted == 1)


async def test_cancelling_closes_the_connection(setup):
    setup.fakes[0].mode = "hang"
    task = asyncio.create_task(setup.generate())
    await wait_until(lambda: setup.fakes[0].seen)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: setup.fakes[0].aborted == 1)


async def test_refused_request_is_not_tried_elsewhere(setup, monkeypatch):
    async def refuse(body):
        return web.json_response({"error": {"message": "too long"}}, status=400)

    for fake in setup.fakes:
        monkeypatch.setattr(fake, "sample", refuse)
    with pytest.raises(RequestRefused, match=r"HTTP 400.*too long"):
        await setup.generate()
    assert sum(len(fake.seen) for fake in setup.fakes) == 1


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.fault("a node whose only server had lost a policy version failed every episode")
async def test_a_server_that_lost_the_policy_is_left_and_replaced(setup, servers):
    for fake in setup.fakes[:servers]:
        del fake.loaded[POLICY]
    asked = asyncio.create_task(setup.generate())
    await wait_until(lambda: all(server.restarts for server in setup.group.servers[:servers]))
    assert f"does not know {POLICY}" in setup.group.servers[0].last_error
    for fake in setup.fakes:
        fake.loaded[POLICY] = Path("of the store")
    await asked


async def test_bad_logprob_is_an_error_and_three_of_them_restart_the_server(setup):
    """Also with good answers in between: a NaN may lie in one prompt's cached blocks only."""
    for bad in range(3):
        setup.fakes[0].mode = "well"
        await setup.generate("ep")
        setup.fakes[0].mode = "poisoned"
        assert setup.group.servers[0].state == "ready", bad
        with pytest.raises(BadLogprob, match=r"vllm-0: sampled log-prob -9999.0"):
            await setup.generate("ep")
    await wait_until(lambda: setup.group.servers[0].restarts > 0)
    assert "3 bad log-probs within 300 s" in setup.group.servers[0].last_error


async def test_bad_logprobs_of_long_ago_restart_nothing(setup, monkeypatch):
    monkeypatch.setattr(router_module, "POISONED_WITHIN_S", 0.0)
    setup.fakes[0].mode = "poisoned"
    for _ in range(4):
        with pytest.raises(BadLogprob):
            await setup.generate("ep")
    assert setup.group.servers[0].state == "ready"
