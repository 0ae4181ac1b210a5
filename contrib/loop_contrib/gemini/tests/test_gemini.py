"""Google's generateContent, as its clients send and read it."""

import asyncio
import json
import re

import aiohttp
import pytest

from rollout_server.endpoint import routes as endpoint
from support.open_session import OpenSession

SAID = 'So.\n<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'
LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "OBJECT", "properties": {"n": {"type": "INTEGER"}, "type": {"type": "STRING"}}},
}
TOOLS = [{"functionDeclarations": [LOOK]}, {"googleSearch": {}}]
HELLO = [{"role": "user", "parts": [{"text": "Hello."}]}]


@pytest.fixture
async def opened(running):
    return OpenSession(running, max_tokens_per_turn=200)


async def ask(opened, contents=HELLO, action="generateContent", status=200, model="gemini-x", **options):
    url = f"{opened.url}/v1beta/models/{model}:{action}"
    async with (
        aiohttp.ClientSession(headers={"x-goog-api-key": opened.key}) as http,
        http.post(url, json={"contents": contents, **options}) as answer,
    ):
        assert answer.status == status, await answer.text()
        text = await answer.text()
    if action.startswith("stream") and status == 200:
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines]
    return json.loads(text)


@pytest.mark.parametrize("action", ["generateContent", "streamGenerateContent?alt=sse"])
async def test_calls_and_their_responses_go_on_as_one_sequence(running, opened, action):
    running.vllm.speak = lambda rng: SAID
    system = {"parts": [{"text": "Be brief."}]}
    told = await ask(opened, action=action, tools=TOOLS, systemInstruction=system)
    first = told[-1] if isinstance(told, list) else told
    [candidate] = first["candidates"]
    text, call = candidate["content"]["parts"]
    assert (text, call["functionCall"]["args"], candidate["finishReason"]) == ({"text": "So."}, {"n": 1}, "STOP")
    assert first["modelVersion"] == "gemini-x"
    call["functionCall"]["args"] = {"n": 1.0, "more": None}  # it is known by its id
    response = {"id": call["functionCall"]["id"], "name": "look", "response": {"output": "a tree"}}
    contents = [*HELLO, candidate["content"], {"role": "user", "parts": [{"functionResponse": response}]}]
    await ask(opened, contents, tools=TOOLS, systemInstruction=system)
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2
    shown = segment.messages[0]["content"]
    assert '"type": "object", "properties": {"n": {"type": "integer"}, "type": {"type": "string"}}' in shown
    assert shown.startswith("Be brief.")
    assert segment.messages[-2]["content"] == "<tool_response>\na tree\n</tool_response>"
    usage = first["usageMetadata"]
    assert usage["promptTokenCount"] == segment.turns[0].start
    assert opened.session.notes()["not_applied"] == {"tools": "googleSearch"}


async def test_wishes_are_recorded_and_limits_applied(opened):
    config = {"temperature": 0.5, "topP": 0.95, "topK": 64, "maxOutputTokens": 3, "candidateCount": 2}
    config |= {"thinkingConfig": {"thinkingBudget": 9}, "responseMimeType": "application/json"}
    calling = {"functionCallingConfig": {"mode": "ANY"}}
    answer = await ask(opened, generationConfig=config, toolConfig=calling)
    assert [candidate["finishReason"] for candidate in answer["candidates"]] == ["MAX_TOKENS"] * 2
    noted = opened.session.notes()["not_applied"]
    assert set(noted) == {"temperature", "top_p", "top_k", "thinking", "response_format", "tool_choice"}


async def test_pictures_and_responses_that_are_no_text(opened):
    image = {"inlineData": {"mimeType": "image/png", "data": "x"}}
    results = [{"output": {"a": 1}}, {"error": "no"}, {"stdout": "x", "code": 1}, None]
    responses = [{"functionResponse": {"name": "look", "response": result}} for result in results]
    responses[0]["functionResponse"]["parts"] = [image]
    parts = [{"text": "See "}, {"text": "this."}, image, {"executableCode": {}}, *responses]
    await ask(opened, [{"role": "user", "parts": parts}])
    user, tools = opened.session.segments()[0].messages[:2]
    assert user["content"] == (
        "See this.\n[A part of type 'image' (image/png) is left out here: only text can be read.]\n"
        "[A part of type 'executableCode' is left out here: only text can be read.]"
    )
    for shown in ('{"output": {"a": 1}}\n[A part of type ', "\nno\n", '{"stdout": "x", "code": 1}', "\nnull\n"):
        assert shown in tools["content"]


async def test_thoughts_come_back_or_not(running, opened, monkeypatch):
    tokens = running.node.tokens
    read = tokens.read
    monkeypatch.setattr(tokens, "read", lambda *given: type(read(*given))(read(*given).answer, "hm", 2))
    answer = await ask(opened)
    thought, said = answer["candidates"][0]["content"]["parts"]
    assert thought == {"text": "hm", "thought": True}
    for parts in ([thought, said], [{**said, "thoughtSignature": "x"}], [said, {"thoughtSignature": "x"}]):
        await ask(opened, [*HELLO, {"role": "model", "parts": parts}, *HELLO])
    assert len(opened.session.segments()) == 3
    assert all(len(segment.turns) <= 2 for segment in opened.session.segments())


async def test_tokens_are_counted(opened):
    counted = await ask(opened, action="countTokens")
    answer = await ask(opened)
    assert counted == {"totalTokens": answer["usageMetadata"]["promptTokenCount"]}


@pytest.mark.parametrize(
    ("contents", "options", "why"),
    [
        ([], {}, "at least one part"),
        ([{"role": "robot", "parts": []}], {}, "role 'robot'"),
        ([{"role": "model", "parts": [{"inlineData": {"mimeType": "image/png"}}]}], {}, "a model's parts are"),
        (HELLO, {"tools": [{"functionDeclarations": [{}]}]}, "has no name"),
        ([{"role": "user", "parts": [{"text": "word " * 5000}]}], {}, "maximum context length"),
        ("x", {}, "contents"),
        ([{"role": "model", "parts": [{"text": "{"}]}], {}, "cannot be begun here"),
    ],
)
async def test_refusals_are_in_its_own_shape(opened, contents, options, why):
    refused = await ask(opened, contents, status=400, **options)
    assert why in refused["error"]["message"]
    assert (refused["error"]["code"], refused["error"]["status"]) == (400, "INVALID_ARGUMENT")


async def test_a_rule_for_side_calls_knows_the_model_of_the_path(running):
    from agent_environments.program_protocol import SideCalls

    opened = OpenSession(running, [SideCalls(model="gemini-flash-lite")])
    await ask(opened, model="gemini-flash-lite")
    await ask(opened)
    assert opened.session.turns == 1


RESPONSE_LINE = re.compile(r"^\s*data: (.*)(?:\n\n|\r\r|\r\n\r\n)")
"""By this Google's client for JavaScript finds an event at the beginning of what it has received."""


@pytest.mark.parametrize("fails", [False, True])
async def test_a_long_turn_is_kept_alive_in_a_way_that_googles_clients_read(running, opened, monkeypatch, fails):
    monkeypatch.setattr(endpoint, "ALIVE_S", 0.01)
    running.vllm.answers = lambda body: may_answer.is_set()
    may_answer = asyncio.Event()
    url = f"{opened.url}/v1beta/models/m:streamGenerateContent?alt=sse"
    async with (
        aiohttp.ClientSession(headers={"x-goog-api-key": opened.key}) as http,
        http.post(url, json={"contents": HELLO}) as answer,
    ):
        assert answer.status == 200  # it has begun
        alive = await answer.content.read(1)
        if fails:
            await opened.session.close()
        may_answer.set()
        received = (alive + await answer.content.read()).decode()
    if fails:
        assert json.loads(received)["error"]["code"] == 410
    else:
        assert json.loads(RESPONSE_LINE.match(received)[1])["candidates"]
