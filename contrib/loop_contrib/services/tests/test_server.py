"""The same episodes in process, through OpenEnv and through AgentGym; and what a service does to bad clients."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from agent_environments.conformance import HOSTILE_ACTIONS, check_conformance
from agent_environments.counter import TARGETS, CounterPool
from agent_environments.protocol import EnvironmentCrashed
from contrib_support.served_counter import SPLITS, TASK, TOKEN, client, serving
from loop_contrib.services.cli import main
from loop_contrib.services.server import MAX_BODY_BYTES
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool, play_steps
from support.waiting import DEADLINE_S, wait_until

REPOSITORY = Path(__file__).parents[4]
INDEX = list(TARGETS["train"]).index(TASK)


def act(*calls):
    return "Let me try.\n```python\n" + "\n".join(calls) + "\n```"


SCRIPT = (
    *(act("add(9)", "show()"), "no code", "", " \n", act("add(99)"), act(*["show()"] * 40)),
    act("add(3)", "finish()"),
)
CUT = 20
"""Tokens of an observation; the output of one action in SCRIPT is longer."""


@pytest.fixture
async def served(monkeypatch):
    """A counter pool and the address that serves it."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    pool = CounterPool(lambda text: [], max_worlds=128)
    async with serving(pool, idle_timeout_s=300.0) as (url, _):
        yield pool, url


@pytest.mark.parametrize("protocol", ["openenv", "agentgym"])
@pytest.mark.parametrize("turns", [0, 2, len(SCRIPT) - 1, len(SCRIPT)])
async def test_a_served_episode_is_the_episode_in_process(served, protocol, turns):
    _, url = served
    async with open_pool(client(protocol, url, observation_max_tokens=CUT)) as service:
        expected = await play_steps(CounterPool(word_spans, observation_max_tokens=CUT), TASK, SCRIPT[:turns])
        assert await play_steps(service, TASK, SCRIPT[:turns]) == expected


@pytest.mark.parametrize("protocol", ["openenv", "agentgym"])
async def test_tasks_have_their_names(served, protocol):
    _, url = served
    async with open_pool(client(protocol, url)) as service:
        assert {split: service.tasks(split) for split in SPLITS} == {split: list(TARGETS[split]) for split in SPLITS}


@pytest.mark.parametrize("name", ["somebody/sums", "a: 1 + b?c#d", "100%25"])
async def test_a_dataset_may_have_any_name(monkeypatch, name):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    pool = CounterPool(word_spans)
    pool.dataset = name
    async with serving(pool) as (url, _), open_pool(client("openenv", url)) as service:
        assert service.tasks("train") == list(TARGETS["train"])


async def test_ids_that_several_tasks_of_an_openenv_service_share_name_none_of_them():
    """Else a task of one split would be started as that of another."""
    listed = {"train": [{"id": "1"}, {"id": "sum_2"}], "test": [{"id": "1"}, {"target": 3}]}

    async def tasks(request):
        return web.json_response({"tasks": listed[(await request.json())["split"]]})

    async def answer(request):
        names = ["sums"] if request.path == "/list_environments" else [{"name": split} for split in listed]
        return web.json_response(names)

    application = web.Application()
    application.add_routes(
        [web.get("/list_environments", answer), web.get("/sums/splits", answer), web.post("/sums/tasks", tasks)]
    )
    async with TestServer(application) as server, open_pool(client("openenv", str(server.make_url("")))) as service:
        assert (service.tasks("train"), service.tasks("test")) == (["train_0", "sum_2"], ["test_0", "test_1"])
        assert service.places["test_0"] == {"split": "test", "index": 0}


async def test_splits_of_data_idx_cut_the_tasks_of_all_splits_anew(served):
    _, url = served
    both = [*TARGETS["train"], *TARGETS["dev"]]
    async with open_pool(client("agentgym", url, splits={"few": (10, 14)})) as service:
        assert service.tasks("few") == both[10:14]
        assert (await play_steps(service, both[13], [])) == (await play_steps(CounterPool(word_spans), both[13], []))
    with pytest.raises(EnvironmentCrashed, match=rf"splits\.many goes beyond its {len(both)} tasks"):
        await client("agentgym", url, splits={"many": (0, 100)}).open()


async def test_a_service_that_names_no_tasks_needs_splits():
    async with TestServer(web.Application()) as server:
        url = str(server.make_url(""))
        async with open_pool(client("agentgym", url, splits={"train": (0, 2), "test": (5, 7)})) as service:
            assert (service.tasks("train"), service.tasks("test")) == (["item_0", "item_1"], ["item_5", "item_6"])
        with pytest.raises(EnvironmentCrashed, match="set splits"):
            await client("agentgym", url).open()


@pytest.mark.parametrize("protocol", ["openenv", "agentgym"])
async def test_clients_conform(served, protocol):
    _, url = served
    async with open_pool(client(protocol, url)) as service:
        await check_conformance(service, TASK, HOSTILE_ACTIONS)


async def test_a_service_that_takes_a_connection_and_says_nothing_is_gone_in_time(served, monkeypatch):
    """No wait without an end, and no agent is charged with it: the attempt is repeated."""
    _, url = served
    async with open_pool(client("openenv", url, start_timeout_s=60.0)) as service:
        service.start_timeout_s = 0.2

        async def silent(request):
            await asyncio.Event().wait()

        application = web.Application()
        application.router.add_get("/ws", silent)
        server = TestServer(application)
        await server.start_server()
        service.url = str(server.make_url("")).rstrip("/")
        environment = await service.acquire("episode")
        with pytest.raises(EnvironmentCrashed, match="no connection"):
            await environment.start(TASK)
        await environment.close()
    await server.close()


async def test_pings_are_answered_while_the_policy_thinks(served):
    """A service ends the episode of a socket that answers none, and a turn may be sampled for minutes."""
    _, url = served
    async with open_pool(client("openenv", url)) as service:
        answered = asyncio.Event()

        async def pinging(request):
            socket = web.WebSocketResponse(autoping=False)
            await socket.prepare(request)
            await socket.ping(b"are you there?")
            if (await socket.receive()).type is web.WSMsgType.PONG:
                answered.set()
            await socket.receive()
            return socket

        application = web.Application()
        application.router.add_get("/ws", pinging)
        server = TestServer(application)
        await server.start_server()
        service.url = str(server.make_url("")).rstrip("/")
        line = await service.lease()
        async with asyncio.timeout(DEADLINE_S):
            await answered.wait()
        assert line.alive
        await service.give_back(line)
    await server.close()


async def test_as_many_episodes_as_there_are_places_are_connected_at_once(served):
    """aiohttp has 100 connections unless told otherwise."""
    pool, url = served
    async with open_pool(client("openenv", url, max_worlds=110)) as service:
        environments = [await service.acquire(f"episode{number}") for number in range(110)]
        await asyncio.gather(*(environment.start(TASK) for environment in environments))
        assert pool.status().open_worlds == 110
        await asyncio.gather(*(environment.close() for environment in environments))
    await wait_until(lambda: pool.status().open_worlds == 0)


async def test_agentgyms_words(served):
    """What AgentGym's own clients read: the opening as one text, reward and done, and the last observation again."""
    _, url = served
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:

        async def post(path, **body):
            return await (await http.post(url + path, json=body)).json()

        number = (await post("/create"))["id"]
        assert "reset first" in (await post("/step", id=number, action="x"))["error"]
        opening = await post("/reset", id=number, data_idx=INDEX)
        assert opening["observation"].endswith("Task: Bring the counter from 0 to 12.")
        assert (opening["reward"], opening["done"]) == (0.0, False)
        first = await post("/step", id=number, action=SCRIPT[0])
        assert (first["reward"], first["done"]) == (0.0, False)
        shown = await (await http.get(f"{url}/observation", params={"id": str(number)})).json()
        assert shown == first["observation"]
        last = await post("/step", id=number, action=SCRIPT[-1])
        assert (last["reward"], last["done"]) == (1.0, True)
        assert "from 0 to" in (await post("/reset", id=number, data_idx=999))["error"]
        assert await post("/close", id=number) == {"closed": True}
        assert "no session" in (await post("/close", id=number))["error"]


async def test_agentgyms_clients_get_in_with_the_token_in_the_address(served):
    """They send no token of their own accord, some create a session without a body, and some read a score."""
    _, url = served
    address = URL(url).with_user("agentgym").with_password(TOKEN)
    async with aiohttp.ClientSession() as http:
        created = await (await http.post(address / "create")).json()
        assert created["observation"] == ""
        reset = {"id": created["id"], "data_idx": INDEX}
        assert (await (await http.post(address / "reset", json=reset)).json())["score"] == 0.0
        step = {"id": created["id"], "action": act("add(9)", "add(3)", "finish()")}
        assert (await (await http.post(address / "step", json=step)).json())["score"] == 1.0
        assert (await (await http.post(address / "close", json={"id": created["id"]})).json()) == {"closed": True}
        assert (await http.post(address.with_password("a guess") / "create")).status == 401
        for header in ("Basic", "Basic !", "Bearer", "Bearer ", "basic \udcff", TOKEN):
            assert (await http.post(f"{url}/create", headers={"Authorization": header})).status == 401


async def test_strangers_and_nonsense_are_refused_in_one_line(served):
    _, url = served
    async with aiohttp.ClientSession() as http:
        for path in ("/list_environments", "/ws", "/observation?id=1"):
            assert (await http.get(url + path)).status == 401
        assert (await http.get(f"{url}/health")).status == 200
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        assert "not JSON" in (await (await http.post(f"{url}/create", data=b"{")).json())["error"]
        assert "object" in (await (await http.post(f"{url}/create", data=b"[]")).json())["error"]
        assert (await http.post(f"{url}/create", data=b"x" * (MAX_BODY_BYTES + 1))).status == 413
        assert (await http.post(f"{url}/counter/tasks", json={"split": "trane"})).status == 400
        assert (await http.post(f"{url}/other/tasks", json={"split": "train"})).status == 404
        async with http.ws_connect(f"{url}/ws") as socket:
            for text, code in (
                ("{", "INVALID_JSON"),
                ("[]", "VALIDATION_ERROR"),
                (json.dumps({"type": "jump"}), "UNKNOWN_TYPE"),
                (json.dumps({"type": "step", "data": {"action": "x"}}), "EXECUTION_ERROR"),
                (json.dumps({"type": "step", "data": {"act": 1}}), "VALIDATION_ERROR"),
                (json.dumps({"type": "reset", "data": {"index": 10**6}}), "VALIDATION_ERROR"),
            ):
                await socket.send_str(text)
                assert (await socket.receive_json())["data"]["code"] == code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", "99999"), "--port is 99999; it must be 0 to 65535"),
        (("--idle-timeout-s", "-1"), "--idle-timeout-s is -1; it must be above 0"),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_is_opened(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["counter", *words])
    assert message in capsys.readouterr().err


async def start_service(port=0):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from loop_contrib.services.cli import main; main()",
        *("counter", "--splits", "train", "--port", str(port)),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), TOKEN_VARIABLE: TOKEN},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    line = (await process.stdout.readline()).decode()
    return process, re.search(r"http://\S+", line).group()


@pytest.mark.parametrize("protocol", ["openenv", "agentgym"])
async def test_a_killed_service(protocol, monkeypatch):
    """One that comes back: the episode goes on. One that does not: the attempt has failed."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr("agent_environments.lost_worlds.PAUSE_S", 0.01)
    process, url = await start_service()
    async with open_pool(client(protocol, url)) as service:
        async with begun_episode(service, TASK, "episode") as environment:
            await environment.step(SCRIPT[0])
            process.send_signal(signal.SIGKILL)
            await process.wait()
            waiting = asyncio.create_task(environment.step(SCRIPT[-1]))
            process, _ = await start_service(int(url.rpartition(":")[2]))
            assert (await waiting).done
            assert (await environment.grade()).reward == 1.0
        async with begun_episode(service, TASK) as environment:
            service.start_timeout_s = 0.5
            process.send_signal(signal.SIGKILL)
            await process.wait()
            with pytest.raises(
                EnvironmentCrashed, match=r"no world lasted for 0\.5 s; the last: no connection to http"
            ):
                await environment.step(SCRIPT[0])
        assert service.status().open_worlds == 0


@pytest.mark.parametrize("protocol", ["openenv", "agentgym"])
async def test_a_service_that_restarts_amid_many_episodes_costs_none_of_them(protocol, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr("agent_environments.lost_worlds.PAUSE_S", 0.01)
    process, url = await start_service()
    port, service, made = int(url.rpartition(":")[2]), client(protocol, url), 0
    await service.open()

    async def play(number: int) -> float:
        nonlocal made
        async with begun_episode(service, TASK) as environment:
            for _ in range(8):
                await environment.step(act("show()"))
                made += 1
            assert (await environment.step(act(*["add(9)", "add(3)"], "finish()"))).done
            reward = (await environment.grade()).reward
        return reward

    playing = [asyncio.create_task(play(number)) for number in range(12)]
    for some in (10, 40, 70):
        await wait_until(lambda some=some: made >= some)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        process, _ = await start_service(port)
    assert await asyncio.gather(*playing) == [1.0] * 12
    assert made == 12 * 8
    await service.close()
    process.terminate()
    await process.wait()


async def test_a_service_that_is_not_there_is_named(monkeypatch):
    service = client("openenv", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentCrashed, match=r"127\.0\.0\.1:9 gives no tasks"):
        await service.open()


async def test_the_command_needs_a_token_and_ends_in_order(monkeypatch):
    process, _ = await start_service()
    process.terminate()
    assert await process.wait() == 0


def test_a_harness_cannot_be_served(monkeypatch):
    """Whoever played its world would play it without the program."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(SystemExit, match="a harness cannot be served; its world can"):
        main(["harness", 'command=["true"]', 'world={"name": "counter"}'])
