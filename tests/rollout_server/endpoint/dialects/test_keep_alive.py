"""A long turn in a stream: the connection is kept alive, and the answer, or what became of it, comes through."""

import asyncio

import openai
import pytest

from rollout_server.endpoint import routes
from support.open_session import HELLO, OpenSession
from support.waiting import DEADLINE_S, wait_until

CHAT = {"model": "m", "messages": HELLO, "stream": True}
RESPONSES = {"model": "m", "input": "Hello.", "stream": True}
COMPLETIONS = {"model": "m", "prompt": "Hello.", "stream": True}
ANTHROPIC = {"model": "m", "messages": HELLO, "max_tokens": 50, "stream": True}


@pytest.fixture
async def opened(running, monkeypatch):
    monkeypatch.setattr(routes, "ALIVE_S", 0.01)
    return OpenSession(running)


@pytest.fixture
def sent(monkeypatch):
    """Whether each thing that was sent ended its response."""
    ends_of, is_sent = [], routes._is_sent

    async def seen(request, response, events, ends=True):
        taken = await is_sent(request, response, events, ends)
        ends_of.append(ends)
        return taken

    monkeypatch.setattr(routes, "_is_sent", seen)
    return ends_of


def clients(opened):
    """The client of each dialect, which asks for a stream and returns its events."""
    import anthropic

    ours = opened.client()
    theirs = anthropic.AsyncAnthropic(base_url=opened.url, api_key=opened.key, max_retries=0, timeout=DEADLINE_S)
    return {
        "chat": lambda: ours.chat.completions.create(**CHAT),
        "responses": lambda: ours.responses.create(**RESPONSES),
        "completions": lambda: ours.completions.create(**COMPLETIONS),
        "anthropic": lambda: theirs.messages.create(**ANTHROPIC),
    }


async def events(stream):
    return [event async for event in await stream]


@pytest.mark.fault("a client hangs up during a long turn")
@pytest.mark.parametrize("dialect", ["chat", "responses", "completions", "anthropic"])
async def test_a_long_turn_is_kept_alive_and_read(running, opened, sent, dialect):
    running.vllm.answers = lambda body: len(sent) > 2
    told = await asyncio.wait_for(events(clients(opened)[dialect]()), DEADLINE_S)
    assert (sent[:3], sent[-1]) == ([False] * 3, True)
    assert told
    assert opened.session.turns == 1
    assert all(call.heard for call in opened.session.calls.made.values())


@pytest.mark.parametrize("dialect", ["chat", "responses", "completions", "anthropic"])
async def test_a_long_turn_that_fails_is_told_in_the_stream(running, opened, sent, dialect):
    import anthropic

    running.vllm.answers = lambda body: False
    asking = asyncio.create_task(events(clients(opened)[dialect]()))
    await wait_until(lambda: sent)
    await opened.session.close()
    if dialect == "responses":
        [told] = await asking
        assert (told.type, told.code) == ("error", "episode_over")
    else:
        with pytest.raises((openai.APIError, anthropic.APIError), match="the episode is over"):
            await asking
    assert opened.session.notes()["calls"] == {"refused.410": 1}


async def test_who_hangs_up_in_a_stream_that_is_kept_alive_finds_the_answer(running, opened):
    may_answer = asyncio.Event()
    running.vllm.answers = lambda body: may_answer.is_set()
    client = opened.client()
    stream = await client.chat.completions.create(**CHAT)  # it has begun, without an event
    assert opened.session.turns == 0
    await stream.close()
    [call] = opened.session.calls.made.values()
    await wait_until(lambda: call.lost)
    may_answer.set()
    assert [chunk async for chunk in await client.chat.completions.create(**CHAT)]
    assert opened.session.turns == 1
