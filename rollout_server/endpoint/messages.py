"""Messages of a request, read: roles, parts, tool calls and tool results; the first form is that of OpenAI's chat API.

A harness hands a policy's turn back as it understood it: calls with other blanks in their arguments, without its white
space at the ends, without its thoughts. :meth:`~model_families.chat.messages.ChatMessage.key` does not see such
differences; what a harness does to the arguments themselves is seen through by the ids of calls
(:mod:`rollout_server.endpoint.conversations`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent_environments.tool_calls import ToolCall
from model_families.chat.messages import ChatMessage

MAX_NESTING = 100
"""Of a call's arguments and of tools: they are written as JSON again, which fails at some depth."""


class BadMessages(ValueError):
    """Messages that no policy can be asked with; one line."""


def read_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The messages of a chat request that offers ``tools``.

    Raises:
        BadMessages: no message, an unknown role, content that is no text, or tools that cannot be written.
    """
    if not messages:
        raise BadMessages("messages must hold at least one message")
    check_tools(tools)
    return [read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadMessages for tools that cannot be written."""
    if _nests_deeply(tools):
        raise BadMessages(f"tools must not be nested more than {MAX_NESTING} times")


def read_message(message: Mapping[str, Any], where: str) -> ChatMessage:
    """One message; ``where`` is its place in the request. Raises BadMessages."""
    role, content = message.get("role"), read_text(message.get("content"), where)
    match role:
        case "system" | "developer":
            return ChatMessage("system", content)
        case "user" | "tool":
            return ChatMessage(role, content)
        case "assistant":
            calls = message.get("tool_calls") or []
            read = tuple(_call(call, where) for call in calls)
            return ChatMessage("assistant", content, read, call_ids=tuple(call_id(call.get("id")) for call in calls))
    raise BadMessages(f"{where}.role {role!r} is none of system, developer, user, assistant, tool")


def read_text(content: object, where: str) -> str:
    """``content`` may be text, null, or a list of text parts. Raises BadMessages."""
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
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind}:
            raise BadMessages(f"{where} is of type {kind!r}; the policy reads text only")
    raise BadMessages(f"{where} is no part of a message")


def _call(call: object, where: str) -> ToolCall:
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            return read_call(name, arguments, where)
    raise _no_call(where)


def call_id(given: object) -> str:
    """The id that a call comes back with, "" for none."""
    return given if isinstance(given, str) else ""


def read_call(name: str, arguments: object, where: str) -> ToolCall:
    """A call; ``arguments`` are an object, or the text of one. Raises BadMessages."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict) and not _nests_deeply(given):
        return ToolCall(name, given)
    raise _no_call(where)


def _no_call(where: str) -> BadMessages:
    return BadMessages(f"{where}: a call is a function with a name, and arguments that are a JSON object")


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
