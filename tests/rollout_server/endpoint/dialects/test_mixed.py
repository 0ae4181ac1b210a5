"""One episode in all dialects at once: whatever a client speaks, what was served is what is stored."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_formats.collection_request import Limits
from loop_plumbing.agent_timeout import AgentTimeout
from model_families.chat import open_chat
from rollout_server.endpoint.dialects.anthropic import Anthropic
from rollout_server.endpoint.dialects.chat import ChatDialect
from rollout_server.endpoint.dialects.completions import Completions
from rollout_server.endpoint.dialects.dialect import Dialect
from rollout_server.endpoint.dialects.responses import Responses
from rollout_server.endpoint.session import Session
from rollout_server.endpoint.wire import ApiError
from support.chat_tokenizers import write_qwen3
from support.random_harness import ODD
from support.random_policy import write_tokenizer
from support.random_turns import check_segments, sampled_turn
from support.waiting import DEADLINE_S

CHAT, ANTHROPIC, RESPONSES, COMPLETIONS = ChatDialect(), Anthropic(), Responses(), Completions()
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
TOOLS = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", "strict": True, **FUNCTION}],
    ANTHROPIC: [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
}


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    write_tokenizer(root)
    return {"chatml": open_chat(root), "qwen3": open_chat(write_qwen3(root / "qwen3", words=4000), thinking="kept")}


class Client:
    """An agent that keeps its history in no dialect and speaks any.

    An entry of a history is (role, text), or the (id, content, calls) of an answer, as its dialect told them.
    """

    def __init__(self, tokens, rng):
        self.tokens, self.rng, self.served, self.plain = tokens, rng, [], set()
        limits = Limits(max_turns=1000, max_tokens_per_turn=100, max_context=100_000)
        self.session = Session("e", 7, limits, AgentTimeout(DEADLINE_S), SimpleNamespace(sample=self.sample), tokens)
        self.overlapping, self.writes_on = False, False
        self.identity = self.not_gone_on_from = 0

    async def sample(self, episode_id, token_ids, seed, max_tokens, sampling, stops=()):
        await asyncio.sleep(0)
        self.served.append((list(token_ids), sampled_turn(self.tokens, self.rng)))
        return len(self.served) - 1, self.served[-1][1]

    async def call(self, dialect, body):
        """The answer as its dialect tells it, whole or from the events of a stream."""
        streams = self.rng.random() < 0.3
        asked = dialect.read(json.dumps({**body, "stream": streams}).encode(), self.session.recall)
        self.identity += 1
        before = len(self.served)
        answer = await self.session.complete(asked, str(self.identity), False, lambda: True)
        self.session.calls.heard(str(self.identity))
        if asked.stops:  # which may have cut it
            prompt, sampled = self.served[before]
            kept = slice(answer.completion_tokens)
            cut = SimpleNamespace(token_ids=sampled.token_ids[kept], logprobs=sampled.logprobs[kept])
            self.served[before] = prompt, cut
        assert all(json.loads(line[6:]) for line in self.lines(dialect, asked, answer) if line[6:] != b"[DONE]")
        return json.loads(json.dumps(dialect.whole(asked, answer)))

    @staticmethod
    def lines(dialect, asked, answer):
        stream = b"".join(dialect.events(asked, answer))
        return [line for line in stream.split(b"\n") if line.startswith(b"data: ")]

    async def turn(self, history):
        """Ask for a turn after a history in some dialect, and append it with what answers it."""
        match self.rng.choice([CHAT, RESPONSES, ANTHROPIC]):
            case dialect if dialect is CHAT:
                *others, taken = (await self.call(dialect, self.chat(history)))["choices"]
                self.not_gone_on_from += len(others)
                said = taken["message"]
                calls = [
                    (call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
                    for call in said.get("tool_calls", [])
                ]
                entry = None, said["content"] or "", calls
            case dialect if dialect is RESPONSES:
                said = await self.call(dialect, self.responses(history))
                texts = [item["content"][0]["text"] for item in said["output"] if item["type"] == "message"]
                named = [item for item in said["output"] if item["type"] == "function_call"]
                entry = (
                    said["id"],
                    "".join(texts),
                    [(one["name"], json.loads(one["arguments"]), one["call_id"]) for one in named],
                )
            case dialect:
                said = await self.call(dialect, self.anthropic(history))
                texts = [block["text"] for block in said["content"] if block["type"] == "text"]
                named = [block for block in said["content"] if block["type"] == "tool_use"]
                entry = None, "".join(texts), [(one["name"], one["input"], one["id"]) for one in named]
        entry = entry[0], entry[1], [self.rewritten(*call) for call in entry[2]]
        if self.writes_on and not entry[2] and self.rng.random() < 0.2:
            entry = entry[0], entry[1] + "Yes\nCalling tools:", []
        results = [("tool", self.rng.choice(ODD)) for _ in entry[2]]
        history += [entry, *(results or [("user", self.rng.choice(ODD))])]

    def rewritten(self, name, arguments, identity):
        """A call as some agent keeps it: without its id as it was told, or with it and otherwise."""
        match self.rng.randrange(4):
            case 0:
                return name, arguments, "c"
            case 1:
                return name, {**arguments, "more": None}, identity
            case 2:
                return "invalid", {}, identity
        return name, arguments, identity

    def stops(self):
        return ["Yes"] if self.rng.random() < 0.2 and not self.overlapping else []

    def chat(self, history):
        messages = []
        for entry in history:
            if len(entry) == 2:
                messages.append({"role": entry[0], "content": entry[1]})
                continue
            calls = [
                {"id": own, "type": "function", "function": {"name": name, "arguments": json.dumps(given, indent=1)}}
                for name, given, own in entry[2]
            ]
            messages.append({"role": "assistant", "content": entry[1], **({"tool_calls": calls} if calls else {})})
        more = {"n": 3} if self.rng.random() < 0.1 else {"stop": self.stops()}
        return {"messages": messages, "tools": TOOLS[CHAT], **more}

    def responses(self, history):
        system, items = history[0][1], []
        for entry in history[1:]:
            if len(entry) == 2:
                role, text = entry
                result = {"type": "function_call_output", "call_id": "c", "output": text}
                items.append(result if role == "tool" else {"role": role, "content": text})
                continue
            name, content, calls = entry
            if name is not None and self.rng.random() < 0.5:
                number = name.removeprefix("resp_")
                names = [f"fc_{number}_{place}" for place in range(len(calls))]
                names = [f"msg_{number}", *names] if content or not calls else names
                items += [{"type": "item_reference", "id": one} for one in names]
                continue
            items.append({"type": "reasoning", "id": "rs_9", "summary": []})
            if content or not calls:
                part = {"type": "output_text", "text": content, "annotations": []}
                items.append({"type": "message", "role": "assistant", "content": [part]})
            for called, wish, own in calls:
                items.append({"type": "function_call", "call_id": own, "name": called, "arguments": json.dumps(wish)})
        asked = {"input": items, "instructions": system, "tools": TOOLS[RESPONSES]}
        last = next((place for place in range(len(history) - 1, 0, -1) if len(history[place]) == 3), None)
        if last is not None and history[last][0] is not None and self.rng.random() < 0.3:
            asked |= {"previous_response_id": history[last][0], "input": self.heard(history[last + 1 :])}
        return asked

    @staticmethod
    def heard(entries):
        return [
            {"type": "function_call_output", "call_id": "c", "output": text}
            if role == "tool"
            else {"role": role, "content": text}
            for role, text in entries
        ]

    def anthropic(self, history):
        messages = []
        for entry in history[1:]:
            if len(entry) == 3:
                blocks = [
                    {"type": "tool_use", "id": own, "name": name, "input": given} for name, given, own in entry[2]
                ]
                text = [{"type": "text", "text": entry[1]}] if entry[1] else []
                messages.append({"role": "assistant", "content": [*text, *blocks]})
            elif entry[0] == "tool":
                block = {"type": "tool_result", "tool_use_id": "c", "content": entry[1]}
                if messages[-1]["role"] != "user":
                    messages.append({"role": "user", "content": []})
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": entry[1]})
        system = [{"type": "text", "text": history[0][1], "cache_control": {"type": "ephemeral"}}]
        asked = {"system": system, "messages": messages, "tools": TOOLS[ANTHROPIC], "max_tokens": 50}
        return {**asked, "stop_sequences": self.stops()}

    async def text(self, text):
        """Go on with a text; what it is afterwards."""
        self.plain.update(range(len(self.served), len(self.served) + 1))
        said = await self.call(COMPLETIONS, {"prompt": text, "stop": self.stops()})
        return text + said["choices"][0]["text"] + self.rng.choice(["", " and", "Yes", *ODD])

    def check(self):
        return check_segments(self.session.segments(), self.served, self.tokens, self.plain)


async def played(tokens, rng, edits):
    client = Client(tokens, rng)
    client.writes_on = edits
    histories, text = [[("system", "Count."), ("user", rng.choice(ODD))]], rng.choice(ODD)
    for _ in range(rng.randrange(1, 10)):
        match rng.randrange(5) if edits else 4:
            case 0:
                text = await client.text(text)
            case 1:
                histories.append([("system", rng.choice(["Count.", "Add."])), ("user", rng.choice(ODD))])
                await client.turn(histories[-1])
            case 2 if len(histories[0]) > 3:
                history = [*histories[0]]
                history[-1] = ("user", "Other.")
                client.overlapping = True
                await asyncio.gather(client.turn(history), client.turn([*histories[0]]))
                client.overlapping = False
            case _:
                await client.turn(rng.choice(histories))
    return client


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_every_token_is_stored_once(formats, name, seed):
    asyncio.run(played(formats[name], random.Random(seed), edits=True)).check()


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_one_history_in_any_dialect_is_one_sequence(formats, name, seed):
    client = asyncio.run(played(formats[name], random.Random(seed), edits=False))
    assert len(client.check()) == 1 + client.not_gone_on_from


DEEP = json.loads("[" * 300 + "]" * 300)
ODD_VALUES = [None, True, -1, 0, 1e308, 2**70, "", "x" * 500, "\ud800", [], {}, [None], {"type": "text"}, DEEP, [[1]]]
ODD_VALUES += [{"type": "function_call"}, {"type": "tool_result"}, {"role": "assistant"}, {"type": "item_reference"}]


def changed(value, rng):
    """The same with one part of it replaced, left out or put in again."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(ODD_VALUES)
    places = list(value) if isinstance(value, dict) else range(len(value))
    place = rng.choice(places)
    copy = value.copy()
    match rng.randrange(5):
        case 0:
            del copy[place]
        case 1 if isinstance(copy, list):
            copy.append(rng.choice(ODD_VALUES))
        case _:
            copy[place] = changed(value[place], rng)
    return copy


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_odd_bodies_are_answered_or_refused_in_one_line(formats, seed):
    """Whatever a body holds, there is no failure of ours, and the record stays exact."""

    async def play():
        rng = random.Random(seed)
        client = Client(formats["chatml"], rng)
        history = [("system", "Count."), ("user", "Hello.")]
        for _ in range(3):
            await client.turn(history)
        client.overlapping = True  # no stop texts, which cut what was sampled
        bodies = [(CHAT, client.chat), (RESPONSES, client.responses), (ANTHROPIC, client.anthropic)]
        for dialect, write in rng.sample(bodies, 3):
            body = write(history)
            for _ in range(rng.randrange(1, 4)):
                body = changed(body, rng)
            try:
                await client.call(dialect, body if isinstance(body, dict) else {"messages": body})
            except ApiError as error:
                refused.append((dialect, error))
        json.dumps(client.session.notes(), allow_nan=False).encode()
        return client

    refused: list[tuple[Dialect, ApiError]] = []
    client = asyncio.run(play())
    for dialect, error in refused:
        assert 400 <= error.status < 500
        assert json.dumps(dialect.refusal(error)).encode()
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    stored = sum(sum(segment.mask) for segment in client.session.segments())
    assert stored == client.session.sampled_tokens
