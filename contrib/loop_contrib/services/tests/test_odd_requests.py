"""Every route of `loop serve`, and its socket, asked what nobody asks."""

import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_environments.counter import CounterPool
from loop_contrib.services.server import EnvironmentServer
from loop_plumbing.http_server import Site
from support.odd_requests import DEEP, ODD_VALUES, OddRequest, ask, check_answer, odd_requests
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.attack

TOKEN = "t0ken-of-the-service"
KEYS = ["split", "index", "start", "stop", "task_id", "data_idx", "id", "action", "type", "data"]


@contextlib.asynccontextmanager
async def serving():
    application = EnvironmentServer(CounterPool(lambda text: []), ["train", "dev"], TOKEN).application()
    runner = web.AppRunner(application, shutdown_timeout=0.0)
    await runner.setup()
    await Site(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", application
    finally:
        await runner.cleanup()


async def test_whatever_is_asked_the_answer_is_one_line_of_json():
    async with serving() as (url, application):
        routes = [(route.method, route.resource.canonical) for route in application.router.routes()]
        places = [(method, path.replace("{env}", env)) for method, path in routes for env in ("counter", "{env}")]

        @settings(max_examples=300, database=None, suppress_health_check=list(HealthCheck))
        @given(odd_requests([place for place in places if place[0] != "HEAD"], KEYS, KEYS))
        def attack(odd):
            for token in (TOKEN, "wrong"):
                check_answer(*ask(url, token, odd), TOKEN)

        await asyncio.to_thread(attack)
        assert (await asyncio.to_thread(ask, url, TOKEN, OddRequest("GET", "/tasks", b"", {})))[0] == 200


async def test_a_socket_answers_every_message():
    """It went without a word over a task id that is a list."""
    known = ["reset", "step", "state", "nonsense"]
    messages = st.one_of(
        ODD_VALUES,
        st.fixed_dictionaries(
            {"type": st.sampled_from(known), "data": st.dictionaries(st.sampled_from(KEYS), ODD_VALUES, max_size=3)}
        ),
    )
    sampled = [{"type": "reset", "data": {"task_id": ["reach3_1"]}}, {"type": "reset", "data": {"split": ["train"]}}]

    @settings(max_examples=100, database=None)
    @given(messages.filter(lambda message: not isinstance(message, dict) or message.get("type") != "close"))
    def collect(message):
        sampled.append(message)

    collect()
    async with (
        serving() as (url, _),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
        http.ws_connect(f"{url}/ws") as socket,
        asyncio.timeout(DEADLINE_S),
    ):
        for text in [*map(json.dumps, sampled), DEEP.decode(), "", "{"]:
            await socket.send_str(text)
            answer = await socket.receive_json()
            assert answer["type"] in ("error", "observation", "state"), text
