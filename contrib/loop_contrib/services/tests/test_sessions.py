"""How long a session lives, and what becomes of its episode: idle, at work, cut off, too slow."""

import asyncio

import pytest
from aiohttp import WSMsgType

from agent_environments.counter import CounterPool
from agent_environments.protocol import EnvironmentTimeout
from contrib_support.served_counter import TASK, TOKEN, HeldPool, client, serving
from loop_contrib.services.server import MAX_WAITING
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from loop_contrib.services.sessions import NoEpisode, ServedSession
from support.episodes import begun_episode, open_pool
from support.waiting import DEADLINE_S, wait_until


@pytest.fixture
def pool():
    return CounterPool(lambda text: [])


async def test_a_session_dies_with_its_socket(pool):
    async with serving(pool) as (_, http):
        async with http.ws_connect("/ws") as socket:
            await socket.send_json({"type": "reset", "data": {}})
            assert (await socket.receive_json())["type"] == "observation"
            assert pool.status().open_worlds == 1
        await wait_until(lambda: pool.status().open_worlds == 0)


async def test_an_idle_session_ends(pool):
    async with serving(pool, idle_timeout_s=0.2) as (_, http):
        created = await (await http.post("/create", json={})).json()
        await http.post("/reset", json={"id": created["id"], "data_idx": 0})
        await wait_until(lambda: pool.status().open_worlds == 0)
        answer = await (await http.post("/step", json={"id": created["id"], "action": "x"})).json()
        assert "no session" in answer["error"]


async def test_idle_sessions_end_though_a_client_closes_one_of_them_meanwhile():
    pool = HeldPool()
    pool.may_close.clear()
    async with serving(pool, idle_timeout_s=0.5) as (_, http):

        async def post(path, **body):
            return await (await http.post(path, json=body)).json()

        first, second = (await post("/create"))["id"], (await post("/create"))["id"]
        await post("/reset", id=first, data_idx=0)
        await pool.closing.wait()  # the reaper is at the first
        await post("/close", id=second)
        pool.may_close.set()
        third = (await post("/create"))["id"]
        await post("/reset", id=third, data_idx=0)
        await wait_until(lambda: pool.status().open_worlds == 0)


async def test_a_session_at_work_is_not_idle():
    pool = HeldPool()
    pool.may_start.clear()
    session = ServedSession(pool, "s")
    begun = session.idle_s()
    resetting = asyncio.create_task(session.reset(TASK))
    await pool.starting.wait()
    assert session.idle_s() == 0.0 <= begun
    pool.may_start.set()
    await resetting
    await session.close()
    assert pool.status().open_worlds == 0


async def test_a_reset_that_waited_for_the_end_of_its_session_opens_no_world():
    pool = HeldPool()
    session = ServedSession(pool, "s")
    await session.reset(TASK)
    pool.may_close.clear()
    closing = asyncio.create_task(session.close())
    await pool.closing.wait()
    late = asyncio.create_task(session.reset(TASK))
    pool.may_close.set()
    with pytest.raises(NoEpisode, match="has ended"):
        await late
    await closing
    assert pool.status().open_worlds == 0


@pytest.fixture
def too_slow(monkeypatch):
    """Every step of a counter takes too long."""

    async def step(self, action):
        raise EnvironmentTimeout("the world used up 100 s")

    monkeypatch.setattr("agent_environments.counter.CounterEnvironment.step", step)


@pytest.mark.parametrize("protocol", ["openenv", "agentgym"])
async def test_a_step_that_times_out_at_the_service_times_out_for_our_client(pool, too_slow, protocol, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    async with (
        serving(pool) as (url, _),
        open_pool(client(protocol, url)) as service,
        begun_episode(service, TASK) as environment,
    ):
        with pytest.raises(EnvironmentTimeout, match="the world used up 100 s"):
            await environment.step("anything")
        assert (await environment.grade()).reward == 0.25


async def test_a_step_that_times_out_ends_its_episode_in_a_grade_for_any_client(pool, too_slow):
    """A trainer that discards what ended in an error would let its agent void an episode by an endless loop."""
    async with serving(pool) as (_, http):
        async with http.ws_connect("/ws") as socket:
            await socket.send_json({"type": "reset", "data": {}})
            await socket.receive_json()
            for _ in range(2):
                await socket.send_json({"type": "step", "data": {"action": "while True: pass"}})
                answer = (await socket.receive_json())["data"]
                assert (answer["done"], answer["reward"], answer["observation"]["failed"]) == (True, 0.25, True)
        number = (await (await http.post("/create")).json())["id"]
        await http.post("/reset", json={"id": number, "data_idx": 0})
        step = await (await http.post("/step", json={"id": number, "action": "while True: pass"})).json()
        assert (step["done"], step["reward"], step["reason"]) == (True, 0.25, "environment_timeout")


@pytest.fixture
def held():
    """A pool whose worlds do not start before they may."""
    pool = HeldPool()
    pool.may_start.clear()
    return pool


async def test_pings_are_answered_while_the_environment_works(held):
    """A client of OpenEnv ends its session when a ping is not answered in 20 s, and a step may take minutes."""
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(held) as (_, http),
        http.ws_connect("/ws", autoping=False) as socket,
    ):
        await socket.send_json({"type": "reset", "data": {}})
        await held.starting.wait()
        await socket.ping(b"are you there?")
        assert (await socket.receive()).type is WSMsgType.PONG
        held.may_start.set()
        assert (await socket.receive_json())["type"] == "observation"
        await socket.send_json({"type": "close"})
        assert (await socket.receive()).type is WSMsgType.CLOSE


async def test_a_client_that_waits_for_no_answer_is_hung_up_on(held, monkeypatch):
    hung_up = asyncio.Event()

    class Noting(asyncio.Queue):
        def put_nowait(self, item):
            if item is None:
                hung_up.set()
            super().put_nowait(item)

    monkeypatch.setattr(asyncio, "Queue", Noting)
    async with asyncio.timeout(DEADLINE_S), serving(held) as (_, http), http.ws_connect("/ws") as socket:
        await socket.send_json({"type": "reset", "data": {}})
        await held.starting.wait()
        for _ in range(MAX_WAITING + 1):
            await socket.send_json({"type": "jump"})
        await hung_up.wait()  # it has read them all before it can answer the first
        held.may_start.set()
        answers = [message async for message in socket]
        assert len(answers) == 1 + MAX_WAITING


@pytest.mark.parametrize(
    ("asked", "number"),
    [({}, 0), ({"index": 2}, 2), ({"seed": 1}, 1), ({"seed": 10**9}, None), ({"seed": 2, "index": 1}, 1)],
)
async def test_a_client_draws_a_task_by_its_index_or_by_a_seed(pool, asked, number):
    tasks = pool.tasks("train")
    wanted = tasks[10**9 % len(tasks) if number is None else number]
    async with serving(pool) as (_, http), http.ws_connect("/ws") as socket:

        async def opening(data):
            await socket.send_json({"type": "reset", "data": data})
            return (await socket.receive_json())["data"]["observation"]["text"]

        assert await opening({"split": "train", **asked}) == await opening({"task_id": wanted})
