"""The network to a service is cut: the episode goes on, fails as an attempt, or ends with its reason."""

import asyncio
import dataclasses

import pytest
from aiohttp.test_utils import TestServer

from agent_environments.counter import CounterPool
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, create_pool
from agent_environments.services.server import EnvironmentServer
from agent_environments.services.service_pool import TOKEN_VARIABLE
from support.adapter_support import word_spans
from support.network import Network
from support.waiting import DEADLINE_S, wait_until

TOKEN = "a-token"
TASK = "reach8_1"


def act(*calls):
    return "```python\n" + "\n".join(calls) + "\n```"


@pytest.fixture(params=["openenv", "agentgym"])
async def served(request, monkeypatch):
    """The pool behind a service, the network to it, and a pool of clients. No session outlives its client for long."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr("agent_environments.losses.PAUSE_S", 0.0)
    monkeypatch.setattr("agent_environments.services.service_pool.PROBE_S", 0.5)
    monkeypatch.setattr("agent_environments.services.server.HEARTBEAT_S", 1.0)
    pool = CounterPool(lambda text: [])
    server = TestServer(EnvironmentServer(pool, ["train"], TOKEN, idle_timeout_s=5.0).application())
    await server.start_server()
    async with Network(str(server.make_url(""))).open() as network:
        clients = create_pool(request.param, {"url": network.url, "dataset": "counter"}, word_spans)
        await clients.open()
        yield pool, network, clients
        assert clients.status().open_worlds == 0
        await wait_until(lambda: pool.status().open_worlds == 0)
        await clients.close()
    await server.close()


async def started(clients):
    environment = await clients.acquire("episode")
    await environment.start(TASK)
    await environment.step(act("add(3)"))
    return environment


async def test_an_episode_goes_on_after_the_network_was_cut(served):
    _, network, clients = served
    environment = await started(clients)
    network.cut()
    assert (await environment.step(act("show()"))).observation.startswith("3")
    network.cut()
    assert (await environment.step(act("add(5)", "finish()"))).done
    network.cut()
    assert (await environment.grade()).success
    await environment.close()


async def test_without_a_network_the_attempt_has_failed(served):
    """No agent had a part in it, so it is repeated."""
    _, network, clients = served
    environment = await started(clients)
    clients.rules = environment._rules = dataclasses.replace(clients.rules, start_timeout_s=0.5)
    network.go_down()
    with pytest.raises(EnvironmentCrashed, match=r"no world lasted for 0\.5 s; the last: no connection to http"):
        await environment.step(act("add(5)"))
    await environment.close()


async def test_a_network_that_falls_silent_is_the_machines_doing(served):
    """Nothing else is answered either, so it is not the command that hangs."""
    _, network, clients = served
    environment = await started(clients)
    network.fall_silent()
    clients.rules = environment._rules = dataclasses.replace(clients.rules, step_timeout_s=0.5, start_timeout_s=0.5)
    with pytest.raises(EnvironmentCrashed, match=r"no world lasted for 0\.5 s; the last: no connection to http"):
        await environment.step(act("add(5)", "finish()"))
    network.flow()
    await environment.close()


async def test_a_command_that_hangs_beside_an_answering_service_ends_the_episode_with_its_reason(served, monkeypatch):
    """Whether the command was carried out nobody knows, so there is nothing to grade."""
    _, _, clients = served
    environment = await started(clients)

    async def hang(self, action):
        await asyncio.Event().wait()

    monkeypatch.setattr("agent_environments.counter.CounterEnvironment.step", hang)
    monkeypatch.setattr("agent_environments.services.service_pool.PROBE_S", DEADLINE_S)
    clients.rules = environment._rules = dataclasses.replace(clients.rules, step_timeout_s=0.5)
    with pytest.raises(EnvironmentTimeout, match=r"no answer to 'step' within 0\.5 s"):
        await environment.step(act("add(5)", "finish()"))
    grade = await environment.grade()
    assert (grade.reward, "cut short" in grade.ungradable) == (0.0, True)
    await environment.close()
