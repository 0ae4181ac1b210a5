"""What both servers share, over real sockets: refusals are lines of JSON, and strangers do not use up the files."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from loop_plumbing import http_server
from loop_plumbing.http_server import BadBody, Site, read_agents_json, read_json, trust_client
from support.waiting import DEADLINE_S, wait_until

DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    "body", [DEEP, b'{"a": "\\ud800"}', b"NaN", b'{"a": Infinity}', b"1" * 5000, b"", b"{}x", b'"\xff"']
)
def test_what_breaks_later_is_no_json(body):
    with pytest.raises(BadBody, match="not JSON") as refused:
        read_json(body)
    assert "\n" not in str(refused.value)


def test_an_agents_text_may_be_cut_within_a_surrogate_pair():
    assert read_agents_json(b'{"a": "\\ud800"}') == {"a": "\ud800"}
    for body in (DEEP, b"1" * 5000, b"\xff"):
        with pytest.raises(BadBody, match="not JSON"):
            read_agents_json(body)


@contextlib.asynccontextmanager
async def serving():
    """An application that trusts who asks for /trusted, and breaks at /defect; yields its port and its runner."""

    async def trusted(request):
        trust_client(request)
        return web.json_response({})

    async def agent(request):
        trust_client(request, request.query["key"])
        return web.json_response({})

    async def defect(request):
        raise KeyError("of ours")

    app = web.Application()
    app.add_routes([web.get("/trusted", trusted), web.get("/agent", agent), web.get("/defect/{key}", defect)])
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await Site(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1], runner
    finally:
        await runner.cleanup()


async def asked(reader, writer, head):
    """Status and body of the answer to a raw request."""
    async with asyncio.timeout(DEADLINE_S):
        writer.write(head)
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        length = 0
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return status, await reader.readexactly(length)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: " + b"s3cret" * 4000 + b"\r\n\r\n", 400),
        (b"GET /" + b"s3cret" * 4000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /trusted HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /trusted HTTP/1.1\r\nHost: x\r\nExpect: s3cret\r\n\r\n", 417),
        (b"GET /defect/s3cret HTTP/1.1\r\nHost: x\r\n\r\n", 500),
    ],
)
async def test_every_refusal_is_one_line_of_json_that_holds_no_secret(caplog, head, status):
    async with serving() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answered, body = await asked(reader, writer, head)
        writer.close()
    assert answered == status
    assert json.loads(body).keys() == {"error"}
    assert b"\n" not in body
    assert b"s3cret" not in body
    assert "s3cret" not in caplog.text


async def test_strangers_are_hung_up_on_the_oldest_first_and_the_trusted_never(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_STRANGERS", 20)
    async with serving() as (port, runner):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"GET /trusted HTTP/1.1\r\nHost: x\r\n\r\n"
        assert (await asked(reader, writer, head))[0] == 200
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        await wait_until(lambda: len(runner.server.connections) == 21)
        async with asyncio.timeout(DEADLINE_S):
            assert await silent[0][0].read() == b""
        assert (await asked(reader, writer, head))[0] == 200
        late = await asyncio.open_connection("127.0.0.1", port)
        assert (await asked(*late, head))[0] == 200
        for _, open_writer in [*silent, late, (reader, writer)]:
            open_writer.close()


@pytest.mark.attack
@pytest.mark.fault("one agent's connections shut the trainer out")
async def test_a_key_has_so_many_connections_and_others_are_not_hung_up_on_for_it(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS_OF_KEY", 10)
    async with serving() as (port, runner):
        head, greedy = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n", []
        trusted, other = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await asked(*trusted, head % b"trusted"))[0] == 200
        assert (await asked(*other, head % b"agent?key=other"))[0] == 200
        for _ in range(100):
            greedy.append(await asyncio.open_connection("127.0.0.1", port))
            assert (await asked(*greedy[-1], head % b"agent?key=greedy"))[0] == 200
        await wait_until(lambda: len(runner.server.connections) == 12)
        async with asyncio.timeout(DEADLINE_S):
            assert await greedy[89][0].read() == b""
        for connection, path in ((trusted, b"trusted"), (other, b"agent?key=other"), (greedy[90], b"agent?key=greedy")):
            assert (await asked(*connection, head % path))[0] == 200
        for _, writer in (trusted, other, *greedy):
            writer.close()


async def test_a_silent_connection_ends(monkeypatch):
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.2)
    async with serving() as (port, _):
        for said in (b"", b"GET /trusted HT"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            async with asyncio.timeout(DEADLINE_S):
                assert await reader.read() == b""
            writer.close()


@pytest.mark.fault("a body that is packed as the server does not read it is called no HTTP")
@pytest.mark.parametrize("packed", ["zstd", "br"])
async def test_a_body_packed_in_another_way_is_named(packed):
    async with serving() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /trusted HTTP/1.1\r\nHost: a\r\nContent-Encoding: {packed}\r\nContent-Length: 2\r\n\r\nxx"
        status, body = await asked(reader, writer, head.encode())
        writer.close()
    assert (status, "send it plain, or gzipped" in body.decode()) == (415, True)
