"""The package ``renderers``, with which others train models, writes the ids that a folder's template does here.

Each family: what opens an episode, a turn that is spoken, what follows it, and what is read of it, with tools and
without. Of Qwen3.5, GLM-4.5 and Gemma 4, whose offers of tools are told in our own words, what stands behind the
question is compared.
"""

import importlib
from dataclasses import dataclass

import pytest

from agent_environments.tool_calls import ToolCall, parse_tool_calls, render_tool_call
from model_families.chat import open_chat
from model_families.chat.messages import ChatMessage
from support.chat_templates import FORMS
from support.chat_tokenizers import write_qwen3

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds é.", "parameters": {"type": "object", "properties": {}}},
}
CALL = ToolCall("add", {"n": 1, "text": 'a "b" é'})
SYSTEM, ASK = ChatMessage("system", "Be brief."), ChatMessage("user", "Add 1 to é.\n\n```python\nprint(1)\n```")
THOUGHT = "I add.\nThen I look."
RESULT, MORE = ChatMessage("tool", 'a "2"'), ChatMessage("user", "And?")


@dataclass(frozen=True)
class Family:
    """A renderer of the package, and the form in ``support.chat_templates`` that is its template."""

    module: str
    renderer: str
    form: str
    same_tools: bool = False
    """The offer of tools is the published one."""


FAMILIES = {
    "qwen3": Family("qwen3", "Qwen3", "Qwen3", same_tools=True),
    "llama3": Family("llama_3", "Llama3", "Llama 3.1", same_tools=True),
    "qwen3_5": Family("qwen35", "Qwen35", "Qwen3.5"),
    "glm4_5": Family("glm45", "GLM45", "GLM-4.5"),
    "gemma4": Family("gemma4", "Gemma4", "Gemma 4"),
}
WAYS = [
    (name, mode)
    for name, family in FAMILIES.items()
    for mode in ((None, "stripped", "off") if FORMS[family.form].thinking else (None,))
]


class ForRenderers:
    """The tokenizer of a chat, as the package asks for one."""

    eos_token_id = unk_token_id = None
    name_or_path = ""

    def __init__(self, chat):
        self.control, self.vocab_size = chat._control, chat.vocab_size

    def encode(self, text, add_special_tokens=False):
        return self.control.encode(text)

    def decode(self, token_ids, skip_special_tokens=False, **options):
        return self.control.decode(token_ids)

    def convert_tokens_to_ids(self, word):
        return self.control.ids.get(word)


class Pair:
    """A chat, and the package's renderer in the same way of thinking."""

    def __init__(self, folder, family, mode):
        self.family, self.chat = family, open_chat(folder, thinking=mode)
        settings = {}
        if self.chat.thinking is not None:
            retention = "tool_cycle" if mode == "stripped" else "all"
            settings = {"enable_thinking": mode != "off", "thinking_retention": retention}
        config = getattr(importlib.import_module("renderers.configs"), f"{family.renderer}RendererConfig")
        module = importlib.import_module(f"renderers.{family.module}")
        self.renderer = getattr(module, f"{family.renderer}Renderer")(ForRenderers(self.chat), config(**settings))

    def opening(self, messages, tools=(), ask=True):
        shown = [_shown(message) for message in messages]
        return list(self.renderer.render_ids(shown, tools=list(tools) or None, add_generation_prompt=ask))

    def extension(self, prompt, sampled, messages, tools=()):
        shown = [_shown(message) for message in messages]
        grown = self.renderer.bridge_to_next_turn(prompt, sampled, shown, tools=list(tools) or None)
        return None if grown is None else grown.token_ids[len(prompt) + len(sampled) :]

    def compared(self, ids, tools):
        """The ids, without the offer of tools where it is not the published one."""
        if not tools or self.family.same_tools:
            return ids
        question = self.chat.encode_text(ASK.content)
        return ids[next(at for at in range(len(ids)) if ids[at : at + len(question)] == question) :]


def _shown(message):
    shown = {"role": message.role, "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
        shown["tool_calls"] = [{"id": "call00000", "type": "function", "function": call} for call in calls]
    elif message.role == "tool":
        shown |= {"tool_call_id": "call00000", "name": CALL.name}
    return shown


def said(content="", *calls, reasoning=""):
    return ChatMessage("assistant", content, calls, reasoning)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    folders = {name: FORMS[family.form].write(root / name) for name, family in FAMILIES.items()}
    folders["qwen3"] = write_qwen3(root / "qwen3", words=12_000)
    return {(name, mode): Pair(folders[name], FAMILIES[name], mode) for name, mode in WAYS}


OPENINGS = {
    "a question": ([ASK], ()),
    "a system message": ([SYSTEM, ASK], ()),
    "tools": ([SYSTEM, ASK], (ADD,)),
    "tools alone": ([ASK], (ADD, ADD)),
    "an answer": ([SYSTEM, ASK, said("Done."), MORE], ()),
    "a call": ([SYSTEM, ASK, said("", CALL), RESULT], (ADD,)),
    "a call and a question": ([ASK, said("", CALL), RESULT, MORE], (ADD,)),
}


@pytest.mark.parametrize(
    ("way", "name"),
    # With thinking off, renderers keeps the empty block of an earlier turn, and the template does not.
    [(way, name) for way in WAYS for name in OPENINGS if way[1] != "off" or OPENINGS[name][0][-1] == ASK],
)
def test_what_opens_an_episode(pairs, way, name):
    pair, (messages, tools) = pairs[way], OPENINGS[name]
    ours, theirs = (pair.compared(each.opening(messages, tools), tools) for each in (pair.chat, pair))
    assert ours == theirs
    assert len(ours) > 10


THINKING = {
    "kept in a tool cycle": ([SYSTEM, ASK, said("Yes.", CALL, reasoning=THOUGHT), RESULT], True),
    "dropped before a question": ([ASK, said("Yes.", reasoning=THOUGHT), MORE], False),
}


@pytest.mark.parametrize(
    ("way", "name"),
    # Where thinking is kept, renderers is told to keep all, as the history that was served does.
    [
        (way, name)
        for way in WAYS
        for name, (_, kept) in THINKING.items()
        if FORMS[FAMILIES[way[0]].form].thinking and (way[1] == "stripped" or (way[1] is None and kept))
    ],
)
def test_thinking_is_where_renderers_has_it(pairs, way, name):
    pair, (messages, kept) = pairs[way], THINKING[name]
    ours, theirs = (pair.compared(each.opening(messages, (ADD,)), (ADD,)) for each in (pair.chat, pair))
    assert ours == theirs
    assert (THOUGHT in pair.chat.decode(ours)) == kept


TURNS = {
    "an answer": ("Yes.", "", [MORE], ()),
    "a call": (render_tool_call(CALL), "", [RESULT], (ADD,)),
    "a thought and a call": (render_tool_call(CALL), THOUGHT, [RESULT], (ADD,)),
    "a thought and an answer": ("Yes.", THOUGHT, [MORE], ()),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name)
        for way in WAYS
        for name, (_, thought, _, _) in TURNS.items()
        if not thought or (FORMS[FAMILIES[way[0]].form].thinking and way[1] != "off")
    ],
)
def test_a_spoken_turn_and_what_follows_it(pairs, way, name):
    pair, (action, thought, after, tools) = pairs[way], TURNS[name]
    chat = pair.chat
    prompt, turn = chat.opening([SYSTEM, ASK], tools), chat.spoken(action, tools, thought)
    read = chat.read(prompt, turn, bool(tools))
    assert (read.reasoning, read.cut_in_thinking) == (thought, False)
    assert parse_tool_calls(read.answer) == [CALL] if tools else read.answer == "Yes."
    ours, theirs = chat.extension(prompt, turn, after, tools), pair.extension(prompt, turn, after, tools)
    if chat.thinking == "stripped" and after == [MORE]:
        assert theirs is None
        assert (ours is None) == bool(thought or way[0] == "qwen3_5"), "what has no thinking stays as it was"
    elif theirs is None:
        assert (way, name) == (("glm4_5", None), "an answer"), "for it, a turn without marks is all thinking"
    else:
        assert ours == theirs
    if ours is not None:
        assert chat.decode(chat.opening([SYSTEM, ASK], tools)) in chat.decode([*prompt, *turn, *ours])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_spoken_as_renderers_writes_it_into_the_history(pairs, name):
    pair = pairs[name, None]
    prompt = pair.chat.opening([ASK], (ADD,))
    turn = pair.chat.spoken(render_tool_call(CALL), (ADD,))
    whole = pair.opening([ASK, said("", CALL), RESULT], (ADD,))
    ids = pair.compared([*prompt, *turn], (ADD,))
    assert pair.compared(whole, (ADD,))[: len(ids)] == ids


def test_a_call_ends_thinking_that_nothing_closed(pairs):
    chat = pairs["qwen3", None].chat
    prompt = chat.opening([ASK], (ADD,))
    turn = [*chat._control.encode(f"<think>\nhm\n{render_tool_call(CALL)}"), chat.turn_end]
    read = chat.read(prompt, turn, with_tools=True)
    assert (read.reasoning, parse_tool_calls(read.answer), read.cut_in_thinking) == ("hm", [CALL], False)
    assert chat.decode(turn[: read.thinking_tokens]) == "<think>\nhm\n"
