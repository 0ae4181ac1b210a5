"""Messages of a chat request as the policy reads them, and when two of them are the same message.

OpenAI's API has roles, parts, tool calls and tool results; the policy reads ChatML turns of text. What stands in a turn
is Qwen2.5's own form (:mod:`agent_environments.tool_calls`): tools are offered in the system message, calls stand in
the assistant's text, and results that follow each other share one user message.

A harness hands a policy's turn back as it understood it: calls with other blanks in their arguments, without its white
space at the ends, without its thoughts. :meth:`ChatMessage.key` does not see such differences.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_environments.observation import printable
from agent_environments.tool_calls import (
    CALL_OPENS,
    BadCall,
    ToolCall,
    parse_tool_calls,
    render_tool_call,
    render_tool_response,
    tools_section,
)

MAX_NESTING = 100
"""Of a call's arguments and of tools: they are written as JSON again, which fails at some depth."""
_THOUGHT_OPENS, _THOUGHT_CLOSES = "<think>", "</think>"


class BadMessages(ValueError):
    """Messages that no policy can be asked with; one line."""


@dataclass(frozen=True)
class ChatMessage:
    """One ChatML turn: ``content`` is what stands in it, ``calls`` the tool calls of an assistant's."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()

    @property
    def key(self) -> Hashable:
        """Equal for the same message."""
        if self.role != "assistant":
            return self.role, self.content
        calls = tuple((call.name, json.dumps(call.arguments, sort_keys=True)) for call in self.calls)
        return self.role, self.content.strip(), calls

    @property
    def key_without_thought(self) -> Hashable:
        """The key of the same message handed back without the ``<think>`` that it begins with."""
        opens = self.content.find(_THOUGHT_OPENS)
        closes = self.content.find(_THOUGHT_CLOSES, opens)
        if opens < 0 or closes < 0:
            return self.key
        content = self.content[:opens].rstrip() + self.content[closes + len(_THOUGHT_CLOSES) :]
        return ChatMessage(self.role, content, self.calls).key

    @property
    def text(self) -> str:
        """The text between the header of its turn and ``<|im_end|>``."""
        parts = [self.content, *(render_tool_call(call) for call in self.calls)]
        return printable("\n".join(part for part in parts if part))


def read_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The turns of a request's ``messages``, ``tools`` offered in the first.

    Raises:
        BadMessages: no message, an unknown role, or content that is no text.
    """
    if not messages:
        raise BadMessages("messages must hold at least one message")
    turns: list[ChatMessage] = []
    results: list[str] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), _text(message.get("content"), where)
        if role == "tool":
            results.append(content)
            continue
        if results:
            turns.append(ChatMessage("user", render_tool_response(*results)))
            results = []
        match role:
            case "system" | "developer":
                turns.append(ChatMessage("system", content))
            case "user":
                turns.append(ChatMessage("user", content))
            case "assistant":
                calls = message.get("tool_calls") or []
                turns.append(ChatMessage("assistant", content, tuple(_call(call, where) for call in calls)))
            case _:
                raise BadMessages(f"{where}.role {role!r} is none of system, developer, user, assistant, tool")
    if results:
        turns.append(ChatMessage("user", render_tool_response(*results)))
    if not tools:
        return turns
    if _nests_deeply(tools):
        raise BadMessages(f"tools must not be nested more than {MAX_NESTING} times")
    section = tools_section(tools)
    if turns[0].role == "system":
        return [ChatMessage("system", f"{turns[0].content}\n\n{section}"), *turns[1:]]
    return [ChatMessage("system", section), *turns]


def spoken_message(text: str, with_tools: bool) -> ChatMessage:
    """Return the policy's text as a message for the harness. A turn with a block that is no call becomes text alone."""
    calls = parse_tool_calls(text) if with_tools else []
    sound = tuple(call for call in calls if isinstance(call, ToolCall))
    if not calls or any(isinstance(call, BadCall) for call in calls):
        return ChatMessage("assistant", text)
    return ChatMessage("assistant", text[: text.index(CALL_OPENS)].strip(), sound)


def _text(content: object, where: str) -> str:
    """``content`` may be text, null, or a list of text parts."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    raise BadMessages(f"{where}.content must be text, null or a list of text parts")


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind}:
            raise BadMessages(f"{where} is of type {kind!r}; the policy reads text only")
    raise BadMessages(f"{where} is no part of a message")


def _call(call: object, where: str) -> ToolCall:
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            try:
                given = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                given = None
            if isinstance(given, dict) and not _nests_deeply(given):
                return ToolCall(name, given)
    raise BadMessages(f"{where}.tool_calls: a call is a function with a name, and arguments that are a JSON object")


def _nests_deeply(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [part for item in level for part in _parts(item)]
        if not level:
            return False
    return True


def _parts(value: object) -> Iterable[Any]:
    match value:
        case Mapping():
            return value.values()
        case list():
            return value
    return ()
