"""Anthropic's messages as its own client sees them; each answer and event is read strictly by Anthropic's classes."""

from typing import TYPE_CHECKING

import aiohttp
import pytest
from pydantic import TypeAdapter

from rollout_server.endpoint.session import Session
from support.open_session import OpenSession
from support.waiting import DEADLINE_S

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
CALLS = 'So.\n<tool_call>{"name": "add", "arguments": {"n":1}}</tool_call><tool_call>{"name": "add", "arguments": {}}'
CALLS += "</tool_call>"
HELLO = [{"role": "user", "content": "Hello."}]
if TYPE_CHECKING:
    import anthropic


@pytest.fixture(autouse=True, scope="module")
def clients_package():
    """Imported when the first test runs: each worker that collects this file would spend four seconds on it."""
    global anthropic
    import anthropic.types


class Opened(OpenSession):
    def client(self, **options):
        return anthropic.AsyncAnthropic(
            **{"base_url": self.url, "api_key": self.key, "max_retries": 0, "timeout": DEADLINE_S, **options}
        )

    async def ask(self, messages=HELLO, **options):
        """The answer, read strictly."""
        async with self.client() as client:
            raw = await client.messages.with_raw_response.create(
                model="m", messages=messages, **{"max_tokens": 200, **options}
            )
            return anthropic.types.Message.model_validate_json(await raw.text())


@pytest.fixture
async def opened(running):
    return Opened(running, max_tokens_per_turn=200)


async def test_an_answer_is_what_was_sampled(running, opened):
    answer = await opened.ask(system=[{"type": "text", "text": "Be brief."}])
    [segment] = opened.session.segments()
    [turn] = segment.turns
    [block] = answer.content
    assert running.node.tokens.decode(segment.token_ids[turn.start : turn.end - 1]) == block.text
    assert segment.messages[0] == {"role": "system", "content": "Be brief."}
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", turn.end - turn.start)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == turn.start
    assert (await opened.ask(max_tokens=3)).stop_reason == "max_tokens"


async def test_calls_and_their_results_go_on_as_one_sequence(running, opened):
    running.vllm.speak = lambda rng: CALLS
    first = await opened.ask(tools=[ADD])
    text, *calls = first.content
    assert (text.text, [call.input for call in calls], first.stop_reason) == ("So.", [{"n": 1}, {}], "tool_use")
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "1"} for call in calls]
    results[1]["content"] = [{"type": "text", "text": "1"}]
    said = [block.model_dump(exclude_none=True) for block in first.content]
    said.insert(0, {"type": "thinking", "thinking": "hm", "signature": ""})
    results.append({"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}})
    await opened.ask(
        [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": results}], tools=[ADD]
    )
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2
    assert [message["role"] for message in segment.messages][-4:] == ["assistant", "user", "user", "assistant"]


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_thread_goes_on_from_a_message_with_its_system_and_tools(running, opened, recorded):
    """Anthropic's tool runner sends only what is new; where nothing is kept it is told to send all."""
    running.vllm.speak = lambda rng: CALLS
    if not recorded:
        own = opened.session
        session = Session("k", 7, own._limits, own._agent_timeout, own._sampler, running.node.tokens, record=False)
        opened.key = running.node.endpoint.sessions.open(session)
    create = {"thread": {"type": "create"}, "system": "Add.", "tools": [ADD]}
    first = await opened.ask(extra_body=create)
    results = [{"type": "tool_result", "tool_use_id": "x", "content": "1"}] * 2
    thread = {"thread": {"type": "continue", "previous_message_id": first.id}}
    asked = opened.ask([{"role": "user", "content": results}], extra_body=thread)
    if not recorded:
        with pytest.raises(anthropic.NotFoundError) as refused:
            await asked
        assert refused.value.body["error"]["details"] == {"error_code": "thread_not_found"}
        return
    await asked
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2
    assert running.vllm.requests[-1]["token_ids"] == segment.token_ids[: segment.turns[1].start]


async def test_a_stream_says_the_same(running, opened):
    running.vllm.speak = lambda rng: CALLS
    options = {"model": "m", "max_tokens": 200, "messages": HELLO, "tools": [ADD]}
    async with opened.client() as client:
        async with client.messages.stream(**options) as stream:
            final = await stream.get_final_message()
        raw = await client.messages.with_raw_response.create(**options, stream=True)
        lines = [line async for line in (await raw.parse()).response.aiter_lines()]
    assert (final.content[0].text, [call.input for call in final.content[1:]]) == ("So.", [{"n": 1}, {}])
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    event = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    kinds = [event.validate_json(one).type for one in data]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


async def test_a_stop_text_is_told_and_recognised_when_it_is_put_back(running, opened):
    running.vllm.speak = lambda rng: "Thought.\n</code> and more"
    answer = await opened.ask(stop_sequences=["</code>"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "</code>")
    assert answer.content[0].text == "Thought.\n"
    said = {"role": "assistant", "content": "Thought.\n</code>"}
    await opened.ask([*HELLO, said, {"role": "user", "content": "On."}])
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2


async def test_tokens_are_counted_and_nothing_is_sampled(opened):
    async with opened.client() as client:
        counted = await client.messages.count_tokens(model="m", messages=HELLO)
    answer = await opened.ask()
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert opened.session.turns == 1


async def test_a_system_block_for_the_makers_accounts_is_left_out(running, opened):
    """It is another one in every call, and would begin a sequence each time."""
    told = []
    for number in range(2):
        accounts = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}
        await opened.ask(system=[accounts, {"type": "text", "text": "You code."}])
        told.append(running.vllm.requests[-1]["token_ids"])
    assert told[0] == told[1]


async def test_what_is_not_applied_is_recorded(opened):
    await opened.ask(
        thinking={"type": "enabled", "budget_tokens": 1024},
        tool_choice={"type": "any"},
        tools=[ADD, {"type": "web_search_20250305", "name": "web_search"}],
        extra_body={"top_k": 3},
    )
    assert set(opened.session.notes()["not_applied"]) == {"thinking", "tool_choice", "tools", "top_k"}


async def test_refusals_are_in_its_own_shape(running, opened):
    async with opened.client(api_key="sk-guess") as client:
        with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
            await client.messages.create(model="m", messages=HELLO, max_tokens=5)
        with pytest.raises(
            anthropic.NotFoundError, match="/v1/messages/batches is not served here; what is"
        ) as refused:
            await client.post("/v1/messages/batches", cast_to=object, body={})
    assert refused.value.body["error"]["type"] == "not_found_error"
    for messages, why in (
        ([], "at least one message"),
        ([{"role": "robot", "content": "x"}], "role 'robot'"),
        ([{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 1}]}], "a JSON object"),
        ([*HELLO, {"role": "assistant", "content": "{"}], "cannot be begun here"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=why):
            await opened.ask(messages)
    with pytest.raises(anthropic.BadRequestError, match="compaction"):
        await opened.ask(extra_body={"compaction": {"type": "auto"}})
    small = Opened(running, max_context=20)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await small.ask([{"role": "user", "content": "word " * 20_000}])


async def test_a_key_is_taken_wherever_a_client_sends_it(opened):
    for options in (
        {"api_key": None, "auth_token": opened.key},
        {"api_key": "none", "base_url": f"{opened.url}/sessions/{opened.key}"},
    ):
        async with opened.client(**options) as client:
            await client.messages.create(model="m", messages=HELLO, max_tokens=5)
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("any")).id == "any"
    both = {"Authorization": "Bearer another", "x-api-key": opened.key}
    async with aiohttp.ClientSession(headers=both) as http, http.get(f"{opened.url}/v1/models") as answer:
        assert answer.status == 200


DEFERRED = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}, "defer_loading": True}


@pytest.mark.fault("an agent's search for tools ends its episode, or offers all tools at once")
async def test_a_tool_that_an_agent_loads_later_is_told_of_where_it_is_loaded(running):
    """The tools that are offered stay the same, so the conversation stays one sequence."""
    opened = Opened(running, max_tokens_per_turn=200, max_context=2000)
    running.vllm.speak = lambda rng: CALLS
    tools = [ADD, DEFERRED]
    first = await opened.ask(tools=tools)
    assert '"look"' not in opened.session.segments()[0].messages[0]["content"]
    found = [{"type": "tool_reference", "tool_name": name} for name in ("look", "smell")]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": found} for call in first.content[1:]]
    said = [block.model_dump(exclude_none=True) for block in first.content]
    await opened.ask(
        [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": results}], tools=tools
    )
    [segment] = opened.session.segments()
    shown = segment.messages[-2]["content"]
    assert (len(segment.turns), shown.count('{"name": "look", "description": "Look."')) == (2, 2)
    assert shown.count("The tool smell can be called from here on.") == 2


async def test_what_only_the_maker_could_search_is_offered_at_once(opened):
    await opened.ask(tools=[DEFERRED, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}])
    assert '"look"' in opened.session.segments()[0].messages[0]["content"]
