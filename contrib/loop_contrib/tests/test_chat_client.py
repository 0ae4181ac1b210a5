"""What a chat service answers, however oddly: a completion, or the service's own words as the reason there is none."""

import contextlib
import json
import logging

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from loop_contrib import chat_client
from loop_contrib.chat_client import (
    ODD_TRIES,
    ChatClient,
    Completion,
    ConversationTooLong,
    NoCompletion,
    Patience,
)
from support.texts import texts_beside

TABLES = texts_beside(__file__)

KEY = "sk-s3cret"


@contextlib.asynccontextmanager
async def answering(*answers):
    """A client of a service that gives these (status, body, headers) one after the other, the last for ever; and how
    often it was asked."""
    asked = []

    async def complete(request):
        asked.append(await request.json())
        status, body, headers = (*answers[min(len(asked), len(answers)) - 1], {})[:3]
        raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        return web.Response(status=status, body=raw, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
    ):
        yield ChatClient(session, str(server.make_url("/v1/"))), asked


def said(content, **more):
    return {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}], **more}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)


PARTS = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "One, "}, "two", {"text": "."}]
PAGE = "<html><head><style>p {}</style><title>Sign in</title></head><body>\n<p>Please.</p></body></html>"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (said("Fine."), "Fine."),
        (said(PARTS), "One, two."),
        (said([]), ""),
        (said(None), ""),
        ({"choices": [{"message": {"role": "assistant", "tool_calls": []}}]}, ""),
        (said("Fine.", usage=None), "Fine."),
        (said("Fine.", usage=[1]), "Fine."),
        (said("Fine.", usage={"prompt_tokens": "many", "completion_tokens": -1}), "Fine."),
        (said("half a \ud83d pair"), "half a ? pair"),
    ],
)
async def test_a_completion_in_any_of_its_forms(body, text):
    async with answering((200, body)) as (client, asked):
        completion = await client.complete({"model": "m"})
        assert (completion.text, completion.prompt_tokens, completion.completion_tokens) == (text, 0, 0)
        assert (len(asked), client.completions) == (1, 1)


@pytest.mark.parametrize(("call", "read"), TABLES["calls_of_tools_in_any_of_their_forms"])
async def test_calls_of_tools_in_any_of_their_forms(call, read):
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with answering((200, {"choices": [{"message": message}]})) as (client, _):
        calls = (await client.complete({})).tool_calls
    assert [[each["id"], each["name"], each["arguments"]] for each in calls] == ([read] if read else [])


async def test_what_the_service_counts_is_read():
    async with answering((200, said("Fine.", usage={"prompt_tokens": 7, "completion_tokens": 2}))) as (client, _):
        completion = await client.complete({})
        assert completion == Completion("Fine.", "stop", 7, 2, completion.seconds, content="Fine.")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"choices": None, "error": {"message": "the provider\nis overloaded"}}, "the provider is overloaded"),
        ({"choices": [], "error": "no credit"}, "no credit"),
        ({"detail": "Not found"}, "Not found"),
        ({"choices": [{"message": None}]}, '{"choices": [{"message": null}]}'),
        (said(17), '"content": 17'),
        (PAGE, "Sign in Please."),
        ("", "an empty body"),
        (b"\xff\xfe", "answers 200 and no completion"),
        ("[" * 100_000, "[[["),
        ("null", "null"),
    ],
)
async def test_an_answer_that_is_none_is_asked_for_again_and_then_told_in_the_services_words(body, words):
    async with answering((200, body, {"Content-Type": "text/html; charset=nonsense"})) as (client, asked):
        with pytest.raises(NoCompletion) as refused:
            await client.complete({})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert (len(asked), client.completions, refused.value.status) == (ODD_TRIES, 0, 200)


async def test_a_service_that_recovers_is_not_given_up():
    odd, busy = (200, {"choices": None}), (529, "overloaded")
    full, answer = (429, "", {"Retry-After": "0"}), (200, said("x"))
    async with answering(*[odd] * 4, busy, *[odd] * 4, full, answer) as (client, _):
        assert (await client.complete({})).text == "x"


@pytest.mark.parametrize("status", [408, 409, 425, 500, 502, 503, 504])
async def test_who_is_away_is_asked_again_as_often_as_is_wanted(status, caplog, monkeypatch):
    monkeypatch.setattr(chat_client, "WARN_AFTER_S", 0.0)
    async with answering(*[(status, "slow down")] * 8, (200, said("x"))) as (client, asked):
        with pytest.raises(NoCompletion, match=f"answers {status}: slow down"):
            await client.complete({}, patience=Patience(3, 600.0))
        assert (await client.complete({})).text == "x"
        assert len(asked) == 9
    assert caplog.text.count("slow down") == 2, "one warning a completion"
    assert KEY not in caplog.text


@pytest.mark.parametrize(("status", "headers"), [(429, {}), (529, {}), (503, {"Retry-After": "0"})])
async def test_who_is_busy_is_asked_again_until_the_patience_is_over(status, headers):
    async with answering(*[(status, "slow down", headers)] * 8, (200, said("x"))) as (client, asked):
        with pytest.raises(NoCompletion, match=f"answers {status}: slow down") as refused:
            await client.complete({}, patience=Patience(tries=1, busy_s=0.0))
        assert refused.value.busy
        assert (await client.complete({}, patience=Patience(tries=1, busy_s=600.0))).text == "x"
        assert len(asked) == 9


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 413, 422])
async def test_a_refusal_is_final(status):
    async with answering((status, {"error": {"message": "no such model"}})) as (client, asked):
        with pytest.raises(NoCompletion, match=f"answers {status}: no such model") as refused:
            await client.complete({})
    assert (len(asked), refused.value.status) == (1, status)


async def test_a_conversation_that_is_too_long_is_told_apart():
    async with answering((400, "This model's maximum context length is 10 tokens")) as (client, _):
        with pytest.raises(ConversationTooLong):
            await client.complete({})


async def test_an_answer_without_end_is_read_so_far_only(monkeypatch):
    monkeypatch.setattr(chat_client, "MAX_ANSWER_BYTES", 1 << 20)
    async with answering((200, b" " * (40 << 20))) as (client, _):
        with pytest.raises(NoCompletion, match="an empty body"):
            await client.complete({}, patience=Patience(1, 600.0))


async def test_nobody_there_is_no_answer(caplog):
    caplog.set_level(logging.DEBUG)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        with pytest.raises(NoCompletion, match="gives no answer") as refused:
            await ChatClient(session, "http://127.0.0.1:9/v1").complete({}, patience=Patience(2, 600.0))
    assert refused.value.status is None
    assert KEY not in str(refused.value) + caplog.text


@pytest.mark.slow
@given(st.recursive(st.one_of(st.text(), st.none(), st.integers(), st.floats()), lambda inner: st.one_of(
    st.lists(inner, max_size=2),
    st.dictionaries(st.sampled_from(["choices", "message", "content", "usage", "error", "text"]), inner, max_size=4),
)))  # fmt: skip
def test_no_answer_breaks_the_reader(data):
    assert isinstance(chat_client._completion(data, 0.0), Completion | None)
    assert isinstance(chat_client._words(data, "x"), str)
