"""The network to a service is cut: the episode goes on, fails as an attempt, or ends with its reason."""

import asyncio
import dataclasses

import pytest
from aiohttp.test_utils import TestServer

from agent_environments.counter import CounterPool
from agent_environments.lost_worlds import LOSSES_PER_COMMAND, WorldLost
from agent_environments.observation import TRUNCATION_NOTE
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, create_pool
from loop_contrib.services.server import EnvironmentServer
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from loop_contrib.services.sessions import ServedSession
from support.adapter_support import word_spans
from support.episodes import open_pool
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
    monkeypatch.setattr("agent_environments.lost_worlds.PAUSE_S", 0.0)
    monkeypatch.setattr("loop_contrib.services.service_pool.PROBE_S", 0.5)
    monkeypatch.setattr("loop_contrib.services.server.HEARTBEAT_S", 1.0)
    pool = CounterPool(lambda text: [])
    async with (
        TestServer(EnvironmentServer(pool, ["train"], TOKEN, idle_timeout_s=5.0).application()) as server,
        Network(str(server.make_url(""))).open() as network,
        open_pool(create_pool(request.param, {"url": network.url, "dataset": "counter"}, word_spans)) as clients,
    ):
        yield pool, network, clients
        assert clients.status().open_worlds == 0
        await wait_until(lambda: pool.status().open_worlds == 0)


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


@pytest.mark.parametrize("trouble", ["go_down", "fall_silent"])
async def test_without_a_network_the_attempt_has_failed(served, trouble):
    """No agent had a part in it, so it is repeated: nothing else is answered either, so no command hangs."""
    _, network, clients = served
    environment = await started(clients)
    clients.step_timeout_s = clients.start_timeout_s = 0.5
    getattr(network, trouble)()
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
    monkeypatch.setattr("loop_contrib.services.service_pool.PROBE_S", DEADLINE_S)
    clients.step_timeout_s = 0.5
    with pytest.raises(EnvironmentTimeout, match=r"no answer to 'step' within 0\.5 s"):
        await environment.step(act("add(5)", "finish()"))
    grade = await environment.grade()
    assert (grade.reward, "cut short" in grade.ungradable) == (0.0, True)
    await environment.close()


async def test_a_command_for_which_the_service_hangs_up_each_time_is_worth_nothing(served, monkeypatch):
    """A service of others may say no more than that when an agent breaks its world. Its neighbours go on."""
    _, _, clients = served
    step = ServedSession.step

    async def hang_up(self, action):
        if "break" in action:
            raise ConnectionResetError("the world is broken")
        return await step(self, action)

    monkeypatch.setattr(ServedSession, "step", hang_up)
    breaking, neighbour = await started(clients), await started(clients)
    result = await breaking.step(act("break()"))
    assert (result.done, result.failed) == (True, True)
    grade = await breaking.grade()
    assert (grade.reward, grade.success) == (0.0, False)
    assert f"{LOSSES_PER_COMMAND} worlds were lost over one command" in grade.ungradable
    assert clients.status().losses == {"cut": LOSSES_PER_COMMAND}
    assert (await neighbour.step(act("add(5)", "finish()"))).done
    assert (await neighbour.grade()).success
    await breaking.close()
    await neighbour.close()


async def test_what_a_service_sends_is_bounded(served, monkeypatch):
    _, _, clients = served
    environment = await started(clients)
    long = "remember " * 30_000
    step = ServedSession.step

    async def say(self, action):
        answer = await step(self, action)
        result = dataclasses.replace(answer.result, observation="seen" + long, reminder=long)
        return dataclasses.replace(answer, result=result)

    with monkeypatch.context() as patch:
        patch.setattr(ServedSession, "step", say)
        result = await environment.step(act("show()"))
    assert result.observation.startswith("seenremember")
    assert result.observation.endswith(TRUNCATION_NOTE)
    assert result.reminder == ""
    await environment.close()


async def test_an_opening_that_no_policy_can_read_fails_the_attempt(served, monkeypatch):
    _, _, clients = served
    monkeypatch.setattr("loop_contrib.services.service_pool.MAX_OPENING_CHARACTERS", 10)
    environment = await clients.acquire("episode")
    with pytest.raises(EnvironmentCrashed, match=r"opens with \d+ characters; 10 are the most"):
        await environment.start(TASK)
    await environment.close()


async def test_an_answer_that_is_too_long_is_none(served, monkeypatch):
    _, _, clients = served
    monkeypatch.setattr("loop_contrib.services.service_pool.MAX_MESSAGE_BYTES", 10)
    with pytest.raises(WorldLost, match="more than 10 bytes"):
        await clients.request("GET", "/tasks")
