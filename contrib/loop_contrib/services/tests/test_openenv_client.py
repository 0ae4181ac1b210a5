"""Our client on an OpenEnv server as its template writes it: no Task API, one session."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_environments.protocol import EnvironmentCrashed, create_pool
from support.adapter_support import word_spans


class OneSession:
    """Guess a number, which the seed is; the refusal of a session comes before or after the client's first word."""

    def __init__(self, refuses_late):
        self.refuses_late = refuses_late
        self.open, self.most, self.refused = 0, 0, 0

    async def not_implemented(self, request):
        return web.json_response({"detail": "no Task API"}, status=501)

    async def health(self, request):
        return web.json_response({"status": "healthy"})

    async def play(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open:
            self.refused += 1
            if self.refuses_late:
                await socket.receive()
            data = {"message": "Server at capacity: 1/1 sessions active.", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        secret = None
        try:
            async for message in socket:
                told = json.loads(message.data)
                if told["type"] == "state":
                    await socket.send_json({"type": "state", "data": {}})
                    continue
                if told["type"] == "reset":
                    secret = told["data"]["seed"]
                right = told["type"] == "step" and told["data"]["action"] == str(secret)
                observation = {"text": "Yes." if right else "Guess."}
                data = {"observation": observation, "reward": float(right), "done": right}
                await socket.send_json({"type": "observation", "data": data})
        finally:
            self.open -= 1
        return socket


@pytest.fixture
async def serve():
    servers = []

    async def start(refuses_late=False):
        service = OneSession(refuses_late)
        app = web.Application()
        routes = [web.get("/ws", service.play), web.get("/health", service.health)]
        app.add_routes([*routes, web.get("/list_environments", service.not_implemented)])
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return service, str(servers[-1].make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


def pool_on(url, **options):
    return create_pool("openenv", {"url": url, "dataset": "guessing", **options}, word_spans)


async def test_a_service_without_tasks_needs_splits(serve):
    _, url = await serve()
    with pytest.raises(EnvironmentCrashed, match="it has no Task API: set splits to ranges of its seeds"):
        await pool_on(url).open()


@pytest.mark.parametrize("refuses_late", [False, True])
async def test_episodes_wait_for_the_one_session_and_none_is_lost(serve, monkeypatch, refuses_late):
    monkeypatch.setattr("loop_contrib.services.openenv_client.PLACE_PAUSE_S", 0.01)
    monkeypatch.setattr("agent_environments.lost_worlds.PAUSE_S", 0.01)
    service, url = await serve(refuses_late)
    pool = pool_on(url, splits={"train": [3, 8], "dev": [8, 9]}, start_timeout_s=5.0)
    await pool.open()
    assert (pool.tasks("train")[0], pool.tasks("dev")) == ("seed_3", ["seed_8"])

    async def play(task):
        environment = await pool.acquire(task)
        await environment.start(task)
        assert not (await environment.step("no")).done
        await asyncio.sleep(0)
        assert (await environment.step(task.removeprefix("seed_"))).done
        grade = await environment.grade()
        await environment.close()
        return grade.reward

    assert await asyncio.gather(*map(play, pool.tasks("train"))) == [1.0] * 5
    assert (service.most, service.refused > 0, pool.crowded) == (1, True, True)
    assert not pool.status().open_worlds
    await pool.close()


async def test_a_session_that_somebody_else_keeps_is_waited_for_only_so_long(serve, monkeypatch):
    monkeypatch.setattr("loop_contrib.services.openenv_client.PLACE_PAUSE_S", 0.01)
    monkeypatch.setattr("agent_environments.lost_worlds.PAUSE_S", 0.01)
    service, url = await serve()
    service.open = 1
    pool = pool_on(url, splits={"train": [3, 4]}, start_timeout_s=0.3)
    await pool.open()
    environment = await pool.acquire("e")
    with pytest.raises(EnvironmentCrashed, match="no sessions left"):
        await environment.start("seed_3")
    assert await pool.answers()
    await environment.close()
    await pool.close()
