"""One environment in several places: a node records the same rollouts, id for id, wherever its episodes are played."""

import itertools
import sys

import pytest
from aiohttp.test_utils import TestServer

from agent_environments.counter import CounterPool
from contrib_support.fake_world_pools import FakePool
from loop_contrib.services.server import EnvironmentServer
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from support.adapter_support import word_spans
from support.counter_node import counter_request, local_node
from support.network import Network
from support.scripted_vllm import ScriptedVllm

TOKEN = "a-token"
SERVICES = ("openenv", "agentgym")


@pytest.fixture
async def serve(monkeypatch):
    """Serves an open pool; returns the configurations of its clients."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    servers = []

    async def serve(pool, **options):
        servers.append(TestServer(EnvironmentServer(pool, ["train"], TOKEN).application()))
        await servers[-1].start_server()
        config = {"url": str(servers[-1].make_url("")), "dataset": pool.dataset, **options}
        return {name: {"name": name, **config} for name in SERVICES}

    yield serve
    for server in servers:
        await server.close()


async def recorded(policy, root, environment, request, speak=None, **changes):
    """Rollout id -> all of the rollout that is not a time and no place."""
    async with local_node(policy, root, environment=environment, **changes) as local:
        local.vllm.speak = speak or local.vllm.speak
        found, end = await local.collect(request)
    assert end.reason == "complete"
    return {rollout.rollout_id: without_times(rollout) for rollout in found}


def without_times(rollout):
    turns = [(turn.start, turn.end, turn.policy_version, turn.finish_reason, turn.failed) for turn in rollout.turns]
    kept = ("token_ids", "mask", "sampler_logprobs", "task_id", "index", "seed", "dataset", "messages", "reward")
    also = ("success", "requirements", "end_reason", "ungradable")
    return turns, {name: getattr(rollout, name) for name in (*kept, *also)}


@pytest.mark.parametrize("service", SERVICES)
async def test_the_rollouts_are_the_same_though_the_network_to_the_service_is_cut(policy, tmp_path, serve, service):
    services = await serve(CounterPool(lambda text: []), observation_max_tokens=200)
    request = counter_request(seed=3)
    own = await recorded(policy, tmp_path / "own", {"name": "counter"}, request)
    section = services[service]
    async with Network(section["url"]).open() as network:
        section["url"] = network.url
        turns = itertools.count(1)

        def cutting(rng):
            if next(turns) % 7 == 0:
                network.cut()
            return ScriptedVllm.play(rng)

        assert await recorded(policy, tmp_path / "served", section, request, cutting) == own
    assert next(turns) > 14


def commands(*known):
    """A policy that gives one of these commands a turn."""
    return lambda rng: f"I try.\nAction: {rng.choice(known)}"


async def test_a_world_is_the_same_under_its_own_interpreter_and_behind_a_service(policy, tmp_path, serve):
    config = {"python": sys.executable, "max_worlds": 8}
    request = counter_request(tasks=["to_3", "to_5"], seed=3)
    pool = FakePool(word_spans, **config)
    await pool.open()
    try:
        places = {
            "own interpreter": {"name": "contrib_support.fake_world_pools:FakePool", **config},
            **(await serve(pool, observation_max_tokens=1000)),
        }
        found = {
            place: await recorded(policy, tmp_path / place, section, request, commands("add", "add", "jump", "raise"))
            for place, section in places.items()
        }
    finally:
        await pool.close()
    own = found["own interpreter"]
    assert {fields["end_reason"] for _, fields in own.values()} == {"completed", "turn_limit"}
    assert len({fields["reward"] for _, fields in own.values()}) > 2
    assert list(found.values()) == [own] * len(places)
