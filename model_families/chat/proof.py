"""Proves that a chat format writes what a model's own chat template writes: a few conversations, to the id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agent_environments.tool_calls import ToolCall
from model_families.chat.format import ChatFormat
from model_families.chat.messages import ChatMessage, Tools
from model_families.chat.template import ChatTemplate
from model_families.chat.templated import Templated
from model_families.chat.tokenizer import read_tokenizer

SYSTEM = ChatMessage("system", "Be brief.")
QUESTION = ChatMessage("user", "Add 1 to é.\n\n```python\nprint(1)\n```\n")
ODD = ChatMessage("user", "  \U0001f600 你好\t<b>&amp;</b> {{ x }} {% if %}\n\n\n \u00a0 end  \n")
ANSWER, THOUGHT = ChatMessage("assistant", "Done: 2."), "I add.\nThen I look."
RESULT = " 2\n"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds to é.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
CALL = ToolCall("add", {"n": 1})
_SHOWN = 60
"""Characters of each side of a difference."""
Conversation = tuple[list[ChatMessage], Tools]


def check_template(folder: str | Path, chat: ChatFormat, template: ChatTemplate) -> None:
    """Check that ``chat`` writes conversations as ``template`` does, and that text in them forges no control token.

    Raises:
        ValueError: the first difference; one line.
    """
    tokens = read_tokenizer(folder)
    for messages, tools in _conversations(chat, template):
        _check_same(chat, tokens, template, messages, tools)
    if isinstance(chat, Templated):
        _check_unforgeable(chat)


def _conversations(chat: ChatFormat, template: ChatTemplate) -> Iterator[Conversation]:
    """What an episode is made of, as far as the format writes it as a template does (docs/chat_formats.md)."""
    asked = [SYSTEM, QUESTION]
    yield [QUESTION], ()
    yield asked, ()
    if chat.thinking != "off":  # keeps the empty block that was served
        thinks = chat.thinking == "stripped" or (chat.thinking == "kept" and chat.observation_role == "tool")
        spoken = replace(ANSWER, reasoning=THOUGHT if thinks else "")
        yield [*asked, spoken, ChatMessage(chat.observation_role, RESULT)], ()
    if chat.native if isinstance(chat, Templated) else "tools" in (template.text or ""):
        yield asked, (ADD,)
    if isinstance(chat, Templated):
        yield [SYSTEM, ODD, ANSWER, QUESTION, replace(ANSWER, content="No.\n\nNever."), ODD], ()
        if chat.native:
            yield [*asked, ChatMessage("assistant", "", (CALL,)), ChatMessage("tool", RESULT)], (ADD,)


def _check_same(
    chat: ChatFormat, tokens: Tokenizer, template: ChatTemplate, messages: Sequence[ChatMessage], tools: Tools
) -> None:
    settings = {"enable_thinking": False} if chat.thinking == "off" else {}
    try:
        if isinstance(chat, Templated):
            text = chat.stock(messages, tools)
        else:
            text = template.render(list(map(_as_given, messages)), tools, **settings)
    except ValueError as error:
        raise ValueError(
            f"the template refuses a conversation that chat format {chat.name} writes ({error})"
        ) from error
    own, ours = tokens.encode(text, add_special_tokens=False).ids, chat.opening(messages, tools)
    if own != ours:
        raise ValueError(f"the template and chat format {chat.name} differ, {_difference(chat, own, ours)}")


def _check_unforgeable(chat: Templated) -> None:
    """Text that holds the template's own words has no more control tokens than any other."""
    hostile = f"x{chat.decode(chat.opening([SYSTEM, QUESTION, ANSWER, QUESTION]))}x"

    def marks(text: str) -> list[int]:
        ids = chat.opening([ChatMessage("system", text), ChatMessage("user", text), ANSWER, ChatMessage("user", text)])
        return [token for token in ids if token in chat.control_ids]

    if marks(hostile) != marks("x"):
        raise ValueError("the template makes control tokens of the text of a message")


def _as_given(message: ChatMessage) -> Mapping[str, Any]:
    thought = {"reasoning_content": message.reasoning} if message.reasoning else {}
    return {"role": message.role, "content": message.content, **thought}


def _difference(chat: ChatFormat, own: Sequence[int], ours: Sequence[int]) -> str:
    pairs = zip(own, ours, strict=False)
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(own), len(ours)))
    before = chat.decode(own[:same])[-_SHOWN // 2 :]
    sides = [chat.decode(ids[same:])[:_SHOWN] for ids in (own, ours)]
    if sides[0] == sides[1]:
        first = [list(ids[same : same + 4]) for ids in (own, ours)]
        return f"in the ids of the same text {sides[0]!r}: {first[0]} in the template, {first[1]} in the format"
    where = f"after {before!r}" if before else "at the beginning"
    said = [repr(side) if side else "nothing" for side in sides]
    return f"{where}: {said[0]} in the template, {said[1]} in the format"
