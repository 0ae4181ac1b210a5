"""What one key may have of the node's processor, memory and threads, however its requests are made."""

import asyncio
import json
import threading
from types import SimpleNamespace

import aiohttp
import pytest

from agent_environments.protocol import StepResult
from rollout_server.collecting.rollout_log import beside
from rollout_server.endpoint import calls as calls_module
from rollout_server.endpoint.dialects import dialect as dialect_module
from rollout_server.endpoint.session import ServedWorld
from rollout_server.endpoint.wire import MESSAGE_CHARACTERS, ApiError
from support.open_session import OpenSession
from support.waiting import DEADLINE_S, wait_until

ASK = [{"role": "user", "content": "x"}]
MANY = 100_000
SMALL_VALUES = {
    "/v1/chat/completions": [
        {"messages": ASK, "tools": [{"function": {"name": ""}}] * MANY},
        {"messages": [{"role": "user"}] * MANY},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": {}}}] * MANY}]},
        {"messages": ASK, "metadata": [{}] * MANY},
        {"messages": ASK, "logit_bias": {str(number): 0 for number in range(MANY)}},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY}], "max_tokens": 1},
        {"messages": ASK, "max_tokens": 1, "tools": [{"name": "a", "input_schema": {}}] * MANY},
    ],
    "/v1/responses": [{"input": [{"type": "reasoning"}] * MANY}, {"input": "x", "tools": [{"type": "x"}] * MANY}],
    "/v1/completions": [{"prompt": "x", "stop": [], "suffix": [[]] * MANY}],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": []}] * MANY}],
}


@pytest.fixture
async def opened(running):
    return OpenSession(running)


async def ask(opened, path, body, **headers):
    """Status and body of the answer to a request with the key of an episode."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    authorized = {"Authorization": f"Bearer {opened.key}", **headers}
    async with (
        aiohttp.ClientSession(headers=authorized) as http,
        http.post(opened.url + path, data=data, timeout=aiohttp.ClientTimeout(DEADLINE_S)) as answer,
    ):
        return answer.status, await answer.read()


@pytest.mark.parametrize(
    ("path", "number"), [(path, number) for path, bodies in SMALL_VALUES.items() for number in range(len(bodies))]
)
async def test_large_bodies_are_read_beside_the_loop(opened, monkeypatch, path, number):
    """And what they are made of: 7.9 MB of small values took the loop 2.5 s, for any number of them."""
    seen = []
    read, overfill = dialect_module.read_agents_json, opened.session._tokens.overfill
    monkeypatch.setattr(
        dialect_module, "read_agents_json", lambda text: seen.append(threading.get_ident()) or read(text)
    )
    monkeypatch.setattr(
        opened.session._tokens, "overfill", lambda *of: seen.append(threading.get_ident()) or overfill(*of)
    )
    status, _ = await ask(opened, path, SMALL_VALUES[path][number])
    assert status in (200, 400)
    assert seen
    assert threading.get_ident() not in seen


async def test_one_large_body_of_a_key_is_read_at_a_time(opened, monkeypatch):
    at_once, most, lock = 0, 0, threading.Lock()
    read = dialect_module.read_agents_json

    def counted(text):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        try:
            return read(text)
        finally:
            with lock:
                at_once -= 1

    monkeypatch.setattr(dialect_module, "read_agents_json", counted)
    body = SMALL_VALUES["/v1/responses"][0]
    await asyncio.gather(*(ask(opened, "/v1/responses", body) for _ in range(5)))
    assert most == 1


@pytest.mark.parametrize("path", [*SMALL_VALUES, "/v1/episode/step", "/v1/episode/finish"])
async def test_a_request_is_counted_before_its_body_is_read(opened, monkeypatch, path):
    monkeypatch.setattr(calls_module, "MAX_CALLS_AT_ONCE", 2)
    host, port = opened.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: n\r\nAuthorization: Bearer {opened.key}\r\nContent-Length: 9\r\n\r\n{{"
    writers = []
    for _ in range(2):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        writers.append(writer)
    await wait_until(lambda: opened.session.calls.requests == 2)
    status, answer = await ask(opened, path, {"never": "read"})
    assert (status, b"requests are being read" in answer) == (429, True)
    for writer in writers:
        writer.transport.abort()
    await wait_until(lambda: opened.session.calls.requests == 0)


async def test_counting_tokens_is_a_call_among_the_others(opened, monkeypatch):
    monkeypatch.setattr(calls_module, "MAX_CALLS_AT_ONCE", 2)
    may_end, prompt = asyncio.Event(), opened.session._prompt

    async def held(asked):
        await may_end.wait()
        return await prompt(asked)

    monkeypatch.setattr(opened.session, "_prompt", held)
    body = {"messages": ASK, "max_tokens": 1}
    counting = [asyncio.create_task(ask(opened, "/v1/messages/count_tokens", body)) for _ in range(2)]
    await wait_until(lambda: opened.session.calls.under_way == 2)
    assert (await ask(opened, "/v1/messages/count_tokens", body))[0] == 429
    assert (await ask(opened, "/v1/chat/completions", {"messages": ASK}))[0] == 429
    may_end.set()
    assert {status for status, _ in await asyncio.gather(*counting)} == {200}


async def test_the_logs_wait_for_no_other_threads():
    may_end = threading.Event()
    waiting = [asyncio.ensure_future(asyncio.to_thread(may_end.wait)) for _ in range(200)]
    waiting += [
        asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(calls_module.READERS, may_end.wait))
        for _ in range(200)
    ]
    try:
        assert await beside(len, "written") == 7
    finally:
        may_end.set()
        await asyncio.gather(*waiting)


HUGE = "m" * (7 << 20)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
async def test_a_models_name_is_neither_kept_nor_repeated_whole(opened, path, body, stream):
    status, answer = await ask(opened, path, {**body, "model": HUGE, "stream": stream})
    assert status == 200
    assert len(answer) < 50_000
    [call] = opened.session.calls.made.values()
    assert len(call.answer.result().model) <= dialect_module.MODEL_CHARACTERS


ECHOED = [
    ("/v1/chat/completions", {"messages": [{"role": HUGE}]}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": HUGE}]}]}),
    ("/v1/chat/completions", {"messages": ASK, "stop": {HUGE: 1}}),
    ("/v1/chat/completions", {"messages": {HUGE: 1}}),
    ("/v1/messages", {"messages": [{"role": HUGE, "content": ""}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [{"type": HUGE}]}], "max_tokens": 1}),
    ("/v1/responses", {"input": [{"type": HUGE}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": HUGE}]}),
    ("/v1/responses", {"input": "x", "previous_response_id": HUGE}),
    ("/v1/episode/finish", {"reward": HUGE}),
]


@pytest.mark.parametrize(("path", "body"), ECHOED)
async def test_a_refusal_does_not_repeat_the_request(opened, path, body):
    status, answer = await ask(opened, path, body)
    assert 400 <= status < 500
    assert len(answer) < 2 * MESSAGE_CHARACTERS + 500


async def test_refused_calls_leave_little_behind(opened):
    for number in range(calls_module.MAX_REMEMBERED_REFUSALS + 200):
        opened.session._done = True
        with pytest.raises(ApiError):
            await opened.session.complete(SimpleNamespace(choices=1), str(number), False, lambda: True)
    assert opened.session.calls.refused <= calls_module.MAX_REMEMBERED_REFUSALS


async def test_a_key_of_a_call_is_kept_as_its_digest(opened):
    status, _ = await ask(opened, "/v1/chat/completions", {"messages": ASK}, **{"Idempotency-Key": "k" * 7000})
    assert status == 200
    assert all(len(identity) < 200 for identity in opened.session.calls.made)


async def test_an_action_is_no_longer_than_the_context(opened):
    acted = []

    async def act(action):
        acted.append(action)
        return StepResult("done", done=True)

    harness = SimpleNamespace(has_world=True, finish=lambda *of: None)
    opened.session.serve_world(ServedWorld("reach3_1", [], harness, act))
    await opened.ask()
    status, answer = await ask(opened, "/v1/episode/step", {"action": HUGE})
    assert (status, b"the action has more than" in answer) == (400, True)
    assert acted == []
    assert (await ask(opened, "/v1/episode/step", {"action": "add(3)"}))[0] == 200
