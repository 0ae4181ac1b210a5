"""Agents that mean harm, over raw sockets: the node lives, and an episode beside them is what it would be alone."""

import asyncio
import contextlib
import json
import socket
import struct

import pytest

from loop_plumbing import http_server
from support.open_session import HELLO, OpenSession
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.attack

MEBIBYTE = b" " * (1 << 20)
BODY = b'{"stream": true, "messages": [{"role": "user", "content": "Hello."}]}'


class Attacker:
    """Raw connections to the node with the key of an episode."""

    def __init__(self, opened):
        self.key = opened.key
        self.host, port = opened.url.removeprefix("http://").split(":")
        self.port = int(port)
        self.writers = []

    async def connect(self):
        reader, writer = await asyncio.open_connection(self.host, self.port)
        self.writers.append(writer)
        return reader, writer

    def head(self, *lines):
        said = ["POST /v1/chat/completions HTTP/1.1", "Host: node", f"Authorization: Bearer {self.key}", *lines]
        return "".join(f"{line}\r\n" for line in [*said, ""]).encode()

    async def status(self, reader):
        async with asyncio.timeout(DEADLINE_S):
            return int((await reader.readuntil(b"\r\n")).split()[1])

    async def leave(self):
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.fixture
async def attacker(running):
    made = Attacker(OpenSession(running))
    yield made
    await made.leave()


async def play(running):
    """Four turns of an honest agent; what is stored of them."""
    opened = OpenSession(running)
    messages = list(HELLO)
    for number in range(4):
        answer = await opened.ask(messages)
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {number}?"}]
    [segment] = opened.session.segments()
    await running.node.endpoint.sessions.close(opened.key)
    return segment.token_ids, segment.mask, segment.sampler_logprobs


async def played_beside(running, attack):
    """An honest episode alone, then beside an attack: both are the same."""
    alone = await play(running)
    harm = asyncio.create_task(attack)
    beside = await play(running)
    await harm
    assert beside == alone == await play(running)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_a_hundred_megabytes(running, attacker, chunked):
    async def attack():
        reader, writer = await attacker.connect()
        told = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {100 * len(MEBIBYTE)}"
        writer.write(attacker.head(told))
        with contextlib.suppress(ConnectionError):  # the node need not take it all
            for _ in range(100):
                writer.write(b"%x\r\n%s\r\n" % (len(MEBIBYTE), MEBIBYTE) if chunked else MEBIBYTE)
                await writer.drain()
        assert await attacker.status(reader) == 413

    await played_beside(running, attack())


async def test_bodies_that_never_come_whole(running, attacker, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_DEADLINE_S", 0.5)

    async def attack():
        readers = []
        for _ in range(20):
            reader, writer = await attacker.connect()
            writer.write(attacker.head("Content-Length: 1000") + b'{"mess')
            readers.append(reader)
        assert {await attacker.status(reader) for reader in readers} == {408}

    await played_beside(running, attack())


@pytest.mark.fault("one agent's connections shut the trainer out")
async def test_the_bytes_of_one_key_are_bounded_and_those_of_others_are_not(running, attacker, monkeypatch):
    monkeypatch.setattr("rollout_server.endpoint.calls.MAX_BYTES_BEING_READ", 3 << 20)

    async def attack():
        readers = []
        for _ in range(3):
            reader, writer = await attacker.connect()
            writer.write(attacker.head(f"Content-Length: {2 << 20}") + MEBIBYTE)
            await writer.drain()
            readers.append(reader)
        reader, writer = await attacker.connect()
        writer.write(attacker.head("Transfer-Encoding: chunked") + b"100000\r\n" + MEBIBYTE + b"\r\n")
        assert await attacker.status(reader) == 429
        await attacker.leave()

    await played_beside(running, attack())


async def test_a_flood_of_connections(running, attacker):
    """Some say nothing, some half a request, some have guessed a key."""

    async def attack():
        guesses = []
        for number in range(400):
            reader, writer = await attacker.connect()
            match number % 4:
                case 1:
                    writer.write(attacker.head()[:40])
                case 2:
                    writer.write(b"\0" * 100)
                case 3:
                    writer.write(b"GET /sessions/sk-%d/v1/models HTTP/1.1\r\nHost: node\r\n\r\n" % number)
                    guesses.append(reader)
        assert {await attacker.status(reader) for reader in guesses} == {401}

    await played_beside(running, attack())


async def test_a_hang_up_in_mid_stream_loses_no_answer(running, attacker):
    """It resets the connection after the first bytes of a stream, and again. Every turn that was sampled is kept."""
    session = running.node.endpoint.sessions.find(attacker.key)

    async def attack():
        for turn in range(1, 6):
            reader, writer = await attacker.connect()
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.write(attacker.head(f"Content-Length: {len(BODY)}", f"Idempotency-Key: {turn}") + BODY)
            assert await attacker.status(reader) == 200
            writer.transport.abort()
            reader, writer = await attacker.connect()
            writer.write(attacker.head(f"Content-Length: {len(BODY)}", f"Idempotency-Key: {turn}") + BODY)
            async with asyncio.timeout(DEADLINE_S):
                await reader.readuntil(b"data: [DONE]")
            assert session.turns == turn

    await played_beside(running, attack())
    segments = session.segments()
    assert len(segments) == 5
    served = [body["token_ids"] for body in running.vllm.requests if body["request_id"].rpartition("-")[0] == "e"]
    assert all(segment.token_ids[: segment.turns[0].start] in served for segment in segments)


async def test_settings_that_json_cannot_hold_or_that_are_large(running, attacker):
    """A record that could not be written would be a failure, and void the attempt."""
    settings = {
        "temperature": float("nan"),
        "top_p": float("-inf"),
        "top_k": 10**4000,
        "logit_bias": {str(token): [[["x" * 100] * 9] * 9] * 9 for token in range(50)},
        "reasoning_effort": "x" * 100_000,
        "seed": "\ud800",
        "tool_choice": {"type": "function", "function": {"name": "y" * 100_000}},
        "min_p": 0.5,
        "parallel_tool_calls": True,
    }
    body = json.dumps({**json.loads(BODY), "stream": False, **settings}).encode()
    reader, writer = await attacker.connect()
    writer.write(attacker.head(f"Content-Length: {len(body)}") + body)
    assert await attacker.status(reader) == 200
    noted = running.node.endpoint.sessions.find(attacker.key).notes()["not_applied"]
    assert set(noted) == set(settings)
    assert (noted["min_p"], noted["parallel_tool_calls"], noted["temperature"]) == (0.5, True, "nan")
    stored = json.dumps(noted, allow_nan=False, ensure_ascii=False).encode()
    assert len(stored) < 2000


@pytest.fixture
def encoded(running, monkeypatch):
    """The lengths of the texts that the node encodes."""
    encode, lengths = running.node.tokens._encode, []
    monkeypatch.setattr(running.node.tokens, "_encode", lambda text: lengths.append(len(text)) or encode(text))
    return lengths


HUGE = "word " * 1_400_000
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"text": HUGE})}}]
TOOLS = [{"type": "function", "function": {"name": HUGE, "parameters": {}}}]


X = {"role": "user", "content": "x"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": [{"role": "user", "content": HUGE}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": HUGE}]}]}),
        (CHAT, {"messages": [X, {"role": "assistant", "content": "", "tool_calls": CALLS}]}),
        (CHAT, {"messages": [X, {"role": "tool", "tool_call_id": "1", "content": HUGE}]}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 70}] * 20_000}),
        (CHAT, {"messages": [X], "tools": TOOLS}),
        (RESPONSES, {"input": HUGE}),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": {"text": HUGE}}]}),
        (MESSAGES, {"messages": [X], "system": HUGE}),
        (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/v1/completions", {"prompt": HUGE}),
    ],
)
async def test_seven_megabytes_are_refused_after_a_few_pages_of_them(running, attacker, encoded, path, asked):
    """They took 25 seconds of the processor and a gigabyte, for a context of a thousand tokens."""
    body = json.dumps(asked).encode()
    assert 6 << 20 < len(body) < 8 << 20

    async def attack():
        reader, writer = await attacker.connect()
        writer.write(attacker.head(f"Content-Length: {len(body)}").replace(CHAT.encode(), path.encode()) + body)
        assert await attacker.status(reader) == 400

    await played_beside(running, attack())
    assert sum(encoded) < 100_000
    assert (running.node.endpoint.sessions.find(attacker.key).refused is None) == path.endswith("count_tokens")


@pytest.mark.parametrize("depth", [150, 900, 5000])
@pytest.mark.parametrize("place", ["arguments", "tools", "body"])
async def test_what_is_nested_deeply_is_refused(running, attacker, depth, place):
    deep = '{"a":' * depth + "1" + "}" * depth
    call = f'{{"function": {{"name": "f", "arguments": {deep}}}}}'
    tool = f'{{"function": {{"name": "f", "parameters": {deep}}}}}'
    bodies = {
        "arguments": f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}',
        "tools": f'{{"messages": [{{"role": "user"}}], "tools": [{tool}]}}',
        "body": deep,
    }
    body = bodies[place].encode()
    reader, writer = await attacker.connect()
    writer.write(attacker.head(f"Content-Length: {len(body)}") + body)
    assert await attacker.status(reader) == 400
