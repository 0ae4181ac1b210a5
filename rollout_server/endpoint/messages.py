"""Reads the messages of a request: roles, parts, tool calls and tool results; first in the form of OpenAI's chat API.

A harness hands a policy's turn back as it understood it: calls with other blanks in their arguments, without its white
space at the ends, without its thoughts. :meth:`~model_families.chat.messages.ChatMessage.key` ignores such differences;
calls whose arguments themselves were changed are known by their ids (:mod:`rollout_server.endpoint.conversations`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agent_environments.tool_calls import ToolCall
from loop_plumbing.sanitize import sanitize
from model_families.chat.messages import ChatMessage

MAX_NESTING = 100
"""Most levels of a call's arguments and of tools: they are written as JSON again, which fails at some depth."""
KIND_CHARACTERS, NAME_CHARACTERS = 40, 100


class BadMessages(ValueError):
    """A request has messages that no policy can answer; one line."""


def read_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Read the messages of a chat request that offers ``tools``.

    Raises:
        BadMessages: there is no message, a role is unknown, content is not text, or tools are not JSON.
    """
    if not messages:
        raise BadMessages("messages must hold at least one message")
    check_tools(tools)
    return [read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadMessages if tools are nested too deeply for JSON."""
    if _nests_deeply(tools):
        raise BadMessages(f"tools must not be nested more than {MAX_NESTING} times")


def read_message(message: Mapping[str, Any], where: str) -> ChatMessage:
    """Read a message; ``where`` is its place in the request. Raises BadMessages."""
    role, content = message.get("role"), message.get("content")
    match role:
        case "system" | "developer":
            return ChatMessage("system", read_text(content, where))
        case "user" | "tool":
            return ChatMessage(role, read_heard(content, where), call_ids=(call_id(message.get("tool_call_id")),))
        case "assistant":
            calls = message.get("tool_calls") or []
            tool_calls = tuple(_call(call, where) for call in calls)
            names = tuple(call_id(call.get("id")) for call in calls)
            return ChatMessage("assistant", read_text(content, where), tool_calls, call_ids=names)
    raise BadMessages(f"{where}.role {role!r} is not one of system, developer, user, assistant, tool")


def read_text(content: object, where: str) -> str:
    """Return the text of ``content`` (text, null, or a list of text parts) without thoughts. Raises BadMessages."""
    return "".join(_text(part, place) for part, place in _parts(content, where) if not _is_thought(part))


def read_heard(content: object, where: str, loadable: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> str:
    """Return the text of a user or a tool. A line of text replaces each part that the policy cannot read.

    Args:
        loadable: tools by name; a tool is offered once a part refers to the tool.

    Raises:
        BadMessages: ``content`` is neither text, null nor a list of parts.
    """
    return _heard(content, where, loadable, nested=False)


def _heard(content: object, where: str, loadable: Mapping[str, Mapping[str, Any]], nested: bool) -> str:
    whole, apart = "", False
    for part, place in _parts(content, where):
        text = _render(part, place, loadable, nested) if isinstance(part, Mapping) else None
        gap = "\n" if whole and not whole.endswith("\n") and (apart or text is not None) else ""
        whole, apart = whole + gap + (_text(part, place) if text is None else text), text is not None
    return whole


def _parts(content: object, where: str) -> Iterable[tuple[object, str]]:
    match content:
        case None:
            return ()
        case str():
            return [({"type": "text", "text": content}, where)]
        case list():
            return [(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
    raise BadMessages(f"{where}.content must be text, null or a list of parts")


def _text(part: object, where: str) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind}:
            raise BadMessages(f"{where} is of type {kind!r}; the policy reads text only")
    raise BadMessages(f"{where} is not a part of a message")


def _is_thought(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("thinking", "redacted_thinking", "reasoning")


def _render(part: Mapping[str, Any], where: str, loadable: Mapping[str, Mapping[str, Any]], nested: bool) -> str | None:
    """Return the text that the policy gets for a part; None if ``part`` is a text or no part.

    A document within a document (``nested``) is left out, which bounds the depth.
    """
    match part:
        case {"type": "text" | "input_text" | "output_text" | "refusal"}:
            return None
        case {"type": "tool_reference", "tool_name": str(name)}:
            return loaded_tool(name, loadable.get(name))
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": content}} if not nested:
            return _heard(content, where, loadable, nested=True)
        case {"type": "search_result", "content": content} if not nested:
            head = [line for name in ("title", "source") if isinstance(line := part.get(name), str)]
            return "\n".join([*head, _heard(content, where, loadable, nested=True)])
        case {"type": str(kind)}:
            what, name = f"part of type {kind[:KIND_CHARACTERS]!r}", _name(part)
            return f"[A {what}{name and f' ({name})'} is left out here: only text can be read.]"
    return None


def _name(part: Mapping[str, Any]) -> str:
    """Return the name or else the kind of a part's file, if the part has either."""
    inner = [part, *(value for value in part.values() if isinstance(value, Mapping))]
    names = (of[key] for key in ("filename", "title", "media_type") for of in inner if isinstance(of.get(key), str))
    return sanitize(" ".join(next(names, "").split()), NAME_CHARACTERS)


def loaded_tool(name: str, tool: Mapping[str, Any] | None) -> str:
    """Return the text that tells the policy, in mid-conversation, of a tool that it can call from now on."""
    schema = "" if tool is None else "\n" + json.dumps(tool, ensure_ascii=False)
    return f"The tool {name} can be called from here on.{schema}"


def _call(call: object, where: str) -> ToolCall:
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            return read_call(name, arguments, where)
    raise _no_call(where)


def call_id(value: object) -> str:
    """Return the id that the client gave a call, or ""."""
    return value if isinstance(value, str) else ""


def read_call(name: str, arguments: object, where: str) -> ToolCall:
    """Read a call. ``arguments`` are an object, its JSON text, or empty. Raises BadMessages."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and not _nests_deeply(parsed):
        return ToolCall(name, parsed)
    raise _no_call(where)


def _no_call(where: str) -> BadMessages:
    return BadMessages(f"{where}: a call is a function with a name, and arguments that are a JSON object")


def _nests_deeply(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [part for item in level for part in _inner(item)]
        if not level:
            return False
    return True


def _inner(value: object) -> Iterable[Any]:
    match value:
        case Mapping():
            return value.values()
        case list():
            return value
    return ()
