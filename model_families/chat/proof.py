"""Proves that a model's chat is written as its own chat template writes it: a few conversations, to the id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agent_environments.tool_calls import ToolCall
from model_families.chat.format import ChatFormat
from model_families.chat.messages import ChatMessage, Tools

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
_MAX_DIFFERENCE_CHARACTERS = 60
Conversation = tuple[list[ChatMessage], Tools]


def check_template(tokens: Tokenizer, chat: ChatFormat) -> None:
    """Check that ``chat`` writes conversations as its template does, and that text in them forges no control token.

    Args:
        tokens: the folder's tokenizer, which reads control tokens in any text.

    Raises:
        ValueError: the message names the first difference, in one line.
    """
    for messages, tools in _conversations(chat):
        try:
            text = chat.stock(messages, tools)
        except ValueError as error:
            raise ValueError(f"the template refuses a conversation of an episode ({error})") from error
        own, ours = tokens.encode(text, add_special_tokens=False).ids, chat.opening(messages, tools)
        if own != ours:
            raise ValueError(f"the template's ids and those of an episode differ, {_difference(chat, own, ours)}")
    _check_unforgeable(chat)


def _conversations(chat: ChatFormat) -> Iterator[Conversation]:
    """Yield conversations with each piece that an episode can have (docs/chat_formats.md)."""
    asked = [SYSTEM, QUESTION]
    yield [QUESTION], ()
    yield asked, ()
    if chat.thinking != "off":  # keeps the empty block that was served
        thinks = chat.thinking == "stripped" or (chat.thinking == "kept" and chat.observation_role == "tool")
        spoken = replace(ANSWER, reasoning=THOUGHT if thinks else "")
        yield [*asked, spoken, ChatMessage(chat.observation_role, RESULT)], ()
    yield [SYSTEM, ODD, ANSWER, QUESTION, replace(ANSWER, content="No.\n\nNever."), ODD], ()
    if chat.native:
        yield asked, (ADD,)
        yield [*asked, ChatMessage("assistant", "", (CALL,)), ChatMessage("tool", RESULT)], (ADD,)


def _check_unforgeable(chat: ChatFormat) -> None:
    """Check that text which contains the template's own words gets no more control tokens than other text."""
    hostile = f"x{chat.decode(chat.opening([SYSTEM, QUESTION, ANSWER, QUESTION]))}x"

    def marks(text: str) -> list[int]:
        ids = chat.opening([ChatMessage("system", text), ChatMessage("user", text), ANSWER, ChatMessage("user", text)])
        return [token for token in ids if token in chat.control_ids]

    if marks(hostile) != marks("x"):
        raise ValueError("the template makes control tokens of the text of a message")


def _difference(chat: ChatFormat, own: Sequence[int], ours: Sequence[int]) -> str:
    pairs = zip(own, ours, strict=False)
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(own), len(ours)))
    before = chat.decode(own[:same])[-_MAX_DIFFERENCE_CHARACTERS // 2 :]
    sides = [chat.decode(ids[same:])[:_MAX_DIFFERENCE_CHARACTERS] for ids in (own, ours)]
    if sides[0] == sides[1]:
        first = [list(ids[same : same + 4]) for ids in (own, ours)]
        return f"in the ids of the same text {sides[0]!r}: {first[0]} in the template, {first[1]} in the episode"
    where = f"after {before!r}" if before else "at the beginning"
    texts = [repr(side) if side else "nothing" for side in sides]
    return f"{where}: {texts[0]} in the template, {texts[1]} in the episode"
