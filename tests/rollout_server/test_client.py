"""The client against a scripted node: what is sent again, what is read on, what ends the waiting."""

import asyncio
import json
import logging
from dataclasses import asdict

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loop_formats.collection_request import CollectionEnd, Progress
from rollout_server import client as client_module
from rollout_server.client import NodeUnreachable, RolloutClient, RolloutNodeError
from support.random_policy import write_adapter
from support.small_runs import stored_rollout


@pytest.fixture
async def node(monkeypatch):
    """Starts a server with the given handler on every path; returns its URL."""
    monkeypatch.setattr(client_module, "RETRY_PAUSE_S", 0.01)
    servers = []

    async def start(handler) -> str:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", handler)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


def answering(text, status=200):
    """A handler that gives this answer to each request."""

    async def handle(request):
        return web.Response(text=text, status=status)

    return handle


async def test_an_upload_is_streamed_and_sent_again_whole(node, tmp_path):
    write_adapter(tmp_path, seed=1)
    whole = {name: (tmp_path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    canary, received = {"token_ids": [1, 2]}, []

    async def handle(request):
        assert request.content_length > sum(map(len, whole.values())), "the node bounds uploads by it"
        assert request.headers["Authorization"] == "Bearer token"
        received.append({part.name: bytes(await part.read()) async for part in await request.multipart()})
        if len(received) == 1:
            return web.json_response({"error": "starting"}, status=503)
        return web.json_response({"version": 3, "name": "policy-v0003-x", "seconds": 0.5})

    client = RolloutClient(await node(handle), "token")
    published = await asyncio.to_thread(client.publish_policy, 3, tmp_path, canary)
    assert (published.version, published.name) == (3, "policy-v0003-x")
    assert received == [{**whole, "canary": json.dumps(canary).encode()}] * 2


async def test_health_is_asked_for_without_a_token(node):
    async def handle(request):
        return web.json_response({"status": "ok", "sent": request.headers.get("Authorization")})

    client = RolloutClient(await node(handle), "")
    assert await asyncio.to_thread(client.health) == {"status": "ok", "sent": None}


async def test_a_stream_that_breaks_off_in_a_line_is_read_on_from_the_cursor(node):
    rollouts = [stored_rollout("a", "t_1", index, 0, 1.0, 300, seed=index) for index in range(2)]
    lines = [f'{{"cursor": {n}, "rollout": {rollout.to_json()}}}\n' for n, rollout in enumerate(rollouts, start=1)]
    progress = Progress(**dict.fromkeys(Progress.__dataclass_fields__, 0))
    end = CollectionEnd("complete", 2, 0, 0, {}, 1.0)
    bodies = [
        json.dumps({"heartbeat": True, "progress": asdict(progress)}) + "\n" + lines[0] + lines[1][:50],
        lines[1] + json.dumps({"end": asdict(end)}) + "\n",
    ]
    asked = []

    async def handle(request):
        asked.append(request.path_qs)
        return web.Response(text=bodies[len(asked) - 1])

    stream = RolloutClient(await node(handle), "token").rollouts("a")
    assert await asyncio.to_thread(list, stream) == [progress, *rollouts]
    assert stream.end == end
    assert asked == [f"/v1/collections/a/rollouts?after={cursor}" for cursor in (0, 1)]


async def test_no_proxy_is_asked_and_nothing_is_logged_per_request(node, monkeypatch, caplog):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    caplog.set_level(logging.INFO)

    client = RolloutClient(await node(answering('{"status": "ok"}')), "token")
    assert await asyncio.to_thread(client.health) == {"status": "ok"}
    assert not [record for record in caplog.records if record.name == "httpx"]


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (404, "<html>", RolloutNodeError, r"answers 404 and no JSON; is it a rollout node\?"),
        (
            503,
            '{"error": "vllm-0 is starting"}',
            NodeUnreachable,
            r"is not ready after 0 s: .*vllm-0 is starting; see its log",
        ),
    ],
)
async def test_what_is_no_node_is_told_from_one_that_stays_unready(node, status, body, error, said):
    client = RolloutClient(await node(answering(body, status)), "token", reconnect_s=0.0)
    with pytest.raises(error, match=said):
        await asyncio.to_thread(client.status)


def test_waiting_asks_whether_it_is_in_vain():
    asked = []

    def alive():
        asked.append(None)
        if len(asked) == 2:
            raise KeyboardInterrupt

    client = RolloutClient("http://127.0.0.1:9", "token", alive=alive)
    with pytest.raises(KeyboardInterrupt):
        client.status()
    with pytest.raises(NodeUnreachable, match=r"no rollout node at http://127\.0\.0\.1:9 \(.*refused"):
        RolloutClient("http://127.0.0.1:9", "token", reconnect_s=0.0).status()


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
async def test_what_says_nothing_against_a_request_is_asked_again(node, status):
    answers = iter([status, status, 200])

    async def handle(request):
        if request.path == "/v1/status":
            return web.json_response({"running": 1})
        return web.json_response({"id": "c", "state": "open"}, status=next(answers))

    client = RolloutClient(await node(handle), "token")
    assert await asyncio.to_thread(client.cancel, "c") == "open"


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 500, 507])
async def test_what_the_same_request_would_meet_again_is_final(node, status):
    asked = []

    async def handle(request):
        asked.append(request)
        return web.json_response({"error": "no"}, status=status)

    client = RolloutClient(await node(handle), "token")
    with pytest.raises(RolloutNodeError, match="rollout node: no") as refused:
        await asyncio.to_thread(client.cancel, "c")
    assert (refused.value.status, len(asked)) == (status, 1)


@pytest.mark.parametrize("body", ["<html>", "[1]", "null", "[" * 100_000])
async def test_a_success_that_is_no_answer_of_a_node_is_one_line(node, body):
    client = RolloutClient(await node(answering(body)), "token")
    for call in (client.status, lambda: client.cancel("c"), lambda: client.tasks("train")):
        with pytest.raises(RolloutNodeError, match=r"answers 200 and no JSON; is it a rollout node\?"):
            await asyncio.to_thread(call)
    with pytest.raises(NodeUnreachable, match="is it a rollout node"):
        await asyncio.to_thread(client.wait_ready, 0.0)


@pytest.mark.parametrize(("status", "why"), [(429, "64 collections are open"), (503, "vllm-0 starts")])
async def test_a_refused_call_is_repeated_while_the_node_moves(node, status, why):
    """It starts, or a search over a thousand tasks asks for more collections at once than it opens."""
    asked, told = [], []

    async def handle(request):
        asked.append(request)
        if len(asked) == 7:
            return web.json_response({"status": "fine"})
        return web.json_response({"error": why, "moved": min(len(asked), 9)}, status=status)

    client = RolloutClient(await node(handle), "token", reconnect_s=0.0)
    client.on_progress = told.append
    assert await asyncio.to_thread(client.status) == {"status": "fine"}
    assert told == [f"rollout node: {why}"] * 6
    with pytest.raises(NodeUnreachable, match=f"is not ready after 0 s: rollout node: {why}; see its log"):
        await asyncio.to_thread(client.status)


async def test_the_token_is_in_no_message(node, caplog):
    caplog.set_level(logging.DEBUG)

    said = []
    for url in (await node(answering('{"error": "no"}', 403)), "http://127.0.0.1:9"):
        client = RolloutClient(url, "t0ken", reconnect_s=0.0)
        for call in (client.status, lambda c=client: c.wait_ready(0.0), lambda c=client: list(c.rollouts("c"))):
            try:
                await asyncio.to_thread(call)
            except (RolloutNodeError, NodeUnreachable) as error:
                said.append(repr(error))
    assert len(said) == 6
    assert "t0ken" not in "".join(said) + caplog.text


@pytest.mark.parametrize("url", ["", "127.0.0.1:8700", "ftp://node", "http://", "http://node:port"])
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(ValueError, match="must look like http://host:port"):
        RolloutClient(url, "token")


async def test_a_node_that_moves_while_it_starts_is_waited_for_and_one_that_does_not_is_not(node):
    asked, told = [], []

    async def handle(request):
        asked.append(request)
        if len(asked) == 7:
            return web.json_response({"status": "ok", "policy_versions": [3]})
        report = {
            "status": "starting",
            "waits_for": [f"vllm-0 starts, for {len(asked)} s"],
            "moved": min(len(asked), 9),
        }
        return web.json_response(report, status=503)

    client = RolloutClient(await node(handle), "token")
    client.on_progress = told.append
    assert (await asyncio.to_thread(client.wait_ready, 0.0))["policy_versions"] == [3]
    assert told == [f"it is starting; vllm-0 starts, for {count} s" for count in range(1, 7)]
    with pytest.raises(NodeUnreachable, match=r"is not ready after 0 s: it is starting; vllm-0 starts, for \d+ s"):
        await asyncio.to_thread(client.wait_ready, 0.0)
