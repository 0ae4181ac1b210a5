"""OpenAI's responses as its own client sees them; each answer and event is read strictly by OpenAI's own classes."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.open_session import OpenSession
from support.texts import texts_beside

TABLES = texts_beside(__file__)

ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
CALLS = 'So.\n<tool_call>{"name": "add", "arguments": {"n":1}}</tool_call><tool_call>{"name": "add", "arguments": {}}'
CALLS += "</tool_call>"
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def opened(running):
    return OpenSession(running, max_tokens_per_turn=200)


async def ask(opened, given, **options):
    """The answer, read strictly."""
    async with opened.client() as client:
        raw = await client.responses.with_raw_response.create(model="m", input=given, **options)
        return Response.model_validate_json(raw.text)


def output(call, text):
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


async def test_an_answer_is_what_was_sampled(running, opened):
    answer = await ask(opened, "Hello.", instructions="Be brief.")
    [segment] = opened.session.segments()
    [turn] = segment.turns
    assert running.node.tokens.decode(segment.token_ids[turn.start : turn.end - 1]) == answer.output_text
    assert [message["role"] for message in segment.messages] == ["system", "user", "assistant"]
    assert (answer.status, answer.usage.input_tokens, answer.usage.output_tokens) == (
        "completed",
        turn.start,
        turn.end - turn.start,
    )
    cut = await ask(opened, "Hello.", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("how", ["whole", "referred", "previous", "without ids"])
async def test_a_turn_of_a_message_and_calls_goes_on_as_one_sequence(running, opened, how):
    running.vllm.speak = lambda rng: CALLS
    first = await ask(opened, "Go.", tools=[ADD], instructions="Add.")
    message, *calls = first.output
    assert (message.content[0].text, [call.name for call in calls]) == ("So.", ["add", "add"])
    results = [output(call, "1") for call in calls]
    items = [item.model_dump(exclude_none=True) for item in first.output]
    options = {"tools": [ADD], "instructions": "Add."}
    match how:
        case "previous":
            await ask(opened, results, previous_response_id=first.id, **options)
        case "referred":
            referred = [{"type": "item_reference", "id": item.id} for item in first.output]
            await ask(opened, [{"role": "user", "content": "Go."}, *referred, *results], **options)
        case _:
            if how == "without ids":
                items = [{name: item[name] for name in item if name != "id"} for item in items]
                calls_sent = items[1]["arguments"] = '{ "n" : 1 }'
                assert calls_sent
            await ask(opened, [{"role": "user", "content": "Go."}, *items, *results], **options)
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2
    assert [message["role"] for message in segment.messages] == ["system", "user", "assistant", "user", "assistant"]


async def test_a_stream_says_the_same(running, opened):
    running.vllm.speak = lambda rng: CALLS
    async with opened.client() as client, client.responses.stream(model="m", input="Go.", tools=[ADD]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output[0].content[0].text == "So."
    assert [json.loads(call.arguments) for call in final.output[1:]] == [{"n": 1}, {}]
    for number, event in enumerate(events):
        assert event.sequence_number == number
    assert events[-1].type == "response.completed"
    async with opened.client() as client:
        raw = await client.responses.with_raw_response.create(model="m", input="Go.", tools=[ADD], stream=True)
        lines = [line async for line in raw.parse().response.aiter_lines()]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    kinds = [EVENT.validate_json(one).type for one in data]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == kinds


async def test_a_thought_is_an_item_of_its_own(running, opened, monkeypatch):
    tokens = running.node.tokens
    read = tokens.read

    def thinking(prompt, sampled, with_tools):
        turn = read(prompt, sampled, with_tools)
        return type(turn)(turn.answer, "hm", 2)

    monkeypatch.setattr(tokens, "read", thinking)
    first = await ask(opened, "Go.")
    thought, message = first.output
    assert (thought.content[0].text, first.usage.output_tokens_details.reasoning_tokens) == ("hm", 2)
    history = [{"role": "user", "content": "Go."}, thought, message, {"role": "user", "content": "On."}]
    await ask(opened, history)
    await ask(opened, [history[0], message, history[3]])
    assert opened.session.turns == 3
    assert len(opened.session.segments()) == 2  # the same history twice: two samples of its next turn
    async with opened.client() as client, client.responses.stream(model="m", input="Go.") as stream:
        kinds = {event.type async for event in stream}
    assert "response.reasoning_text.delta" in kinds


async def test_logprobs_are_those_of_the_record(opened):
    answer = await ask(opened, "Hello.", include=["message.output_text.logprobs"])
    [segment] = opened.session.segments()
    [turn] = segment.turns
    told = [one.logprob for one in answer.output[0].content[0].logprobs]
    assert told == segment.sampler_logprobs[turn.start : turn.end - 1]


async def test_wishes_are_recorded(opened):
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    await ask(
        opened, "Hello.", temperature=0.2, text={"format": schema}, tools=[ADD, {"type": "web_search"}], top_p=0.5
    )
    noted = opened.session.notes()["not_applied"]
    assert set(noted) == {"temperature", "top_p", "response_format", "tools"}
    assert noted["tools"] == "web_search"


@pytest.mark.parametrize(("given", "options", "why"), TABLES["what_cannot_be_done_is_refused"])
async def test_what_cannot_be_done_is_refused(opened, given, options, why):
    with pytest.raises(openai.APIStatusError, match=why) as refused:
        await ask(opened, given, **options)
    assert refused.value.status_code in (400, 404)
    assert opened.session.turns == 0


LOOK = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "maps", "description": "Maps.", "tools": [LOOK]}


def called(name, text="So."):
    return f'{text}\n<tool_call>{{"name": "{name}", "arguments": {{"n": 1}}}}</tool_call>'


@pytest.mark.fault("tools in a namespace are not offered")
@pytest.mark.parametrize("streams", [False, True])
async def test_tools_of_a_namespace_are_offered_and_called(running, opened, streams):
    running.vllm.speak = lambda rng: called("maps__look")
    if streams:
        async with opened.client() as client, client.responses.stream(model="m", input="Go.", tools=[SPACE]) as stream:
            first = await stream.get_final_response()
    else:
        first = await ask(opened, "Go.", tools=[SPACE])
    assert '"name": "maps__look", "description": "Maps.\\nLook."' in opened.session.segments()[0].messages[0]["content"]
    message, call = first.output
    assert (call.type, call.name, call.namespace) == ("function_call", "look", "maps")
    items = [item.model_dump(exclude_none=True) for item in (message, call)]
    await ask(opened, [{"role": "user", "content": "Go."}, *items, output(call, "1")], tools=[SPACE])
    without_id = {name: value for name, value in items[1].items() if name not in ("id", "call_id")}
    await ask(opened, [{"role": "user", "content": "Go."}, items[0], without_id, output(call, "2")], tools=[SPACE])
    assert [len(segment.turns) for segment in opened.session.segments()] == [2, 1]
    assert opened.session.notes()["calls"] == {"answered": 3}


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_searches_for_tools(running, opened, streams):
    search = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {}}
    offered = [{**ADD, "defer_loading": True}, search]
    running.vllm.speak = lambda rng: called("tool_search")
    if streams:
        async with opened.client() as client, client.responses.stream(model="m", input="Go.", tools=offered) as stream:
            first = await stream.get_final_response()
    else:
        first = await ask(opened, "Go.", tools=offered)
    shown = opened.session.segments()[0].messages[0]["content"]
    assert ('"tool_search"' in shown, '"add"' in shown) == (True, False)
    message, call = first.output
    assert (call.type, call.execution, call.arguments) == ("tool_search_call", "client", {"n": 1})
    found = {"type": "tool_search_output", "call_id": call.call_id, "execution": "client", "tools": [SPACE]}
    history = [{"role": "user", "content": "Go."}, *(item.model_dump(exclude_none=True) for item in (message, call))]
    running.vllm.speak = lambda rng: called("maps__look")
    second = await ask(opened, [*history, found], tools=offered)
    assert (second.output[1].name, second.output[1].namespace) == ("look", "maps")
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2
    assert "The tool maps__look can be called from here on." in segment.messages[-2]["content"]


async def test_what_only_the_maker_could_search_is_offered_at_once(opened):
    await ask(opened, "Go.", tools=[{**ADD, "defer_loading": True}, {"type": "tool_search"}])
    assert '"add"' in opened.session.segments()[0].messages[0]["content"]


@pytest.mark.fault("an agent that compacts ends its episode")
@pytest.mark.parametrize("streams", [False, True])
async def test_a_history_is_compacted_by_the_policy_itself(running, opened, streams):
    running.vllm.speak = lambda rng: "We counted."
    history = [{"role": "user", "content": "Count."}, {"type": "compaction_trigger"}]
    if streams:
        async with opened.client() as client:
            raw = await client.responses.with_raw_response.create(model="m", input=history, stream=True)
            lines = [line async for line in raw.parse().response.aiter_lines()]
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        [summary] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == [summary]
    else:
        [item] = (await ask(opened, history)).output
        summary = item.model_dump(exclude_none=True)
    assert (summary["type"], summary["encrypted_content"]) == ("compaction", "We counted.")
    await ask(opened, [summary, {"role": "user", "content": "On."}])
    first, second = opened.session.segments()
    assert "Summarise this conversation" in first.messages[1]["content"]
    assert "We counted." in second.messages[0]["content"]


async def test_a_summary_with_a_call_in_it_is_told_whole(running, opened):
    running.vllm.speak = lambda rng: CALLS
    history = [{"role": "user", "content": "Count."}, {"type": "compaction_trigger"}]
    [item] = (await ask(opened, history, tools=[ADD])).output
    assert item.encrypted_content == CALLS
