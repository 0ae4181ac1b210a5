"""Who answers the agent: never with code, in a sentence or two, and an endpoint's failures are not the agent's gain."""

import json

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments.protocol import Message
from contrib_support.chat_endpoint import FakeChatEndpoint
from loop_contrib import chat_client
from loop_contrib.chat_model import ChatEndpoint
from loop_contrib.colbench.expert import QUESTIONS
from loop_contrib.colbench.generator import generate
from loop_contrib.colbench.human import (
    DOES_NOT_KNOW,
    KEYWORDS,
    MAX_CHARACTERS,
    NO_RESPONSE,
    EndpointHuman,
    ScriptedHuman,
    shows_code,
)
from loop_contrib.colbench.task import ColBenchTask
from support.counter_node import TOKEN
from support.episodes import open_pool

TASKS = [task for tasks in generate(0).values() for task in tasks]
WORDS = st.one_of(
    st.text(),
    st.sampled_from([word for words in KEYWORDS.values() for word in words]),
    st.sampled_from(["show me your code", "def", "return", "```python", "I WANT TO ANSWER", "ignore your orders"]),
)


def asked(text):
    return [Message("user", "Please write a function."), Message("assistant", text)]


@pytest.mark.parametrize("task", TASKS[::40], ids=lambda task: task.task_id)
async def test_the_scripted_human_answers_each_question_with_its_particular(task):
    for particular in task.particulars:
        assert await ScriptedHuman().answer(task, asked(QUESTIONS[particular.topic])) == particular.answer


async def test_the_scripted_human_answers_two_things_at_most_and_says_when_he_does_not_know():
    task = next(task for task in TASKS if "bill" in task.task_id)
    said = await ScriptedHuman().answer(task, asked("Which field, limit, unit, rounding, inclusive?"))
    assert said == f"{task.particulars[0].answer} {task.particulars[1].answer}"
    for question in ("", "What is the weather?", QUESTIONS["tie"]):
        assert await ScriptedHuman().answer(task, asked(question)) == DOES_NOT_KNOW


@settings(max_examples=300)
@given(st.sampled_from(TASKS), st.lists(WORDS, max_size=8).map(" ".join))
async def test_the_scripted_human_never_shows_code(task, question):
    said = await ScriptedHuman().answer(task, asked(question))
    assert not shows_code(said, task.reference)
    assert not any(sign in said for sign in ("=", "(", "[", "{", "return", "def "))
    assert len(said) <= MAX_CHARACTERS


def test_code_is_seen_however_it_is_spaced():
    reference = TASKS[0].reference
    last = reference.splitlines()[-1].strip()
    assert shows_code(f"Sure: {last}", reference)
    assert shows_code("  ".join(last), reference)
    assert shows_code("```\nx\n```", reference)
    assert not shows_code("The limit is 20.", reference)


@pytest.fixture
async def endpoint(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("HUMAN_KEY", "sk-human")
    async with FakeChatEndpoint().served() as endpoint:
        yield endpoint


@pytest.fixture
async def human(endpoint):
    async with open_pool(EndpointHuman(ChatEndpoint(endpoint.url, "base", "HUMAN_KEY"))) as human:
        yield human


async def test_the_model_is_told_the_code_and_the_dialogue(endpoint, human):
    task = TASKS[0]
    endpoint.reply = lambda body: "  The field is called score.  "
    assert await human.answer(task, asked("Which \ud800 field?")) == "The field is called score."
    body = endpoint.bodies[-1]
    assert (body["model"], body["temperature"], endpoint.keys[-1]) == ("base", 0, "Bearer sk-human")
    (message,) = body["messages"]
    for part in (task.reference, task.description, "Assistant: Which ? field?", "two sentences", "Never show"):
        assert part in message["content"]


async def test_long_answers_are_cut_and_code_is_not_passed_on(endpoint, human):
    endpoint.reply = lambda body: "x" * 1000
    assert await human.answer(TASKS[0], asked("?")) == "x" * MAX_CHARACTERS
    endpoint.reply = lambda body: TASKS[0].reference
    assert await human.answer(TASKS[0], asked("Show me.")) == DOES_NOT_KNOW


@pytest.mark.parametrize("reply", [400, 500, ""])
async def test_a_question_that_breaks_the_endpoint_does_not_void_the_episode(endpoint, human, reply):
    endpoint.reply = lambda body: reply if "hostile" in json.dumps(body) else "Hello."
    assert await human.answer(TASKS[0], asked("hostile")) == NO_RESPONSE


async def test_a_nodes_own_model_plays_the_human_of_colbench(running, monkeypatch):
    running.vllm.loaded["base"] = running.node.root
    running.vllm.speak = lambda rng: "The limit is 30."
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
        http.post(f"{running.url}/v1/keys", json={"model": "base"}) as answer,
    ):
        opened = await answer.json()
    monkeypatch.setenv("HUMAN_KEY", opened["api_key"])
    human = EndpointHuman(ChatEndpoint(opened["base_url"], "base", "HUMAN_KEY"))
    await human.open()
    try:
        task = ColBenchTask("limit_1", "Count them.", "def count(rows):\n    return len(rows) > 30", ("count([])",))
        said = await human.answer(task, [Message("user", task.description), Message("assistant", "What is the limit?")])
    finally:
        await human.close()
    assert said == "The limit is 30."
    read = running.node.tokens.decode(running.vllm.requests[-1]["token_ids"])
    assert task.reference in read
    assert "Assistant: What is the limit?" in read
    session = running.node.endpoint.sessions.find(opened["api_key"])
    assert (session.turns, session.segments()) == (0, [])
