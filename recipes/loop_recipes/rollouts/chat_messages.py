"""Messages in files of others: their fields read, and those that were not read named.

A record of OpenAI's messages, ShareGPT, ATIF or verifiers holds them; every error names the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agent_environments.tool_calls import ToolCall
from loop_plumbing.breakage import raised_as
from model_families.chat.messages import ChatMessage, ChatRole

_NAMES_OF_ROLES: Mapping[ChatRole, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "bot", "model", "chatgpt", "agent", "function_call", "tool_call"),
    "tool": ("tool", "ipython", "function", "observation", "function_response", "tool_response"),
}
ROLES = {name: role for role, names in _NAMES_OF_ROLES.items() for name in names}
"""The names of roles in OpenAI's API, ShareGPT and ATIF."""
CALLING_ROLES = ("function_call", "tool_call")
"""Roles of messages whose text is a call, or a list of calls, as JSON."""
_TEXT_OF = {"role": "content", "from": "value", "source": "message"}
"""The fields that hold a message's role, of OpenAI's API, ShareGPT and ATIF, and those that hold its text."""
_WHOLE = ("arguments", "tools", "functions", "tool_definitions", "rewards")
"""Fields that count as read with all that is in them."""
_NAMES = {"id", "uuid", "index", "type", "version", "name", "model_name", "step_id", "session_id", "timestamp"}
_FIGURES = {"final_metrics", "prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"}
_UNREPORTED = _NAMES | _FIGURES | {"source", "is_completed", "metadata", "signature"}
"""Fields that have nothing to learn from: a run does not report that it leaves them unread."""
_THOUGHT_PARTS = ("thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")


class TrackedFields(dict[str, Any]):
    """An object of a file that records which of its fields were not read yet."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({key: tracked(value) for key, value in fields.items()})
        self.unread = set(self)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the field's value; ``default`` if the field is null or missing."""
        self.unread.discard(key)
        value = super().get(key)
        return default if value is None else value


def tracked(value: Any) -> Any:
    """Return a JSON value with each object replaced by :class:`TrackedFields`."""
    if isinstance(value, dict):
        return TrackedFields(value)
    return [tracked(item) for item in value] if isinstance(value, list) else value


def unread_fields(value: Any, where: str = "") -> Iterator[str]:
    """Yield the names of fields below ``value`` that were not read although they have content to learn from."""
    if isinstance(value, list):
        for item in value:
            yield from unread_fields(item, f"{where}[]")
    elif isinstance(value, TrackedFields):
        for key, item in value.items():
            name = f"{where}.{key}" if where else key
            if key not in value.unread and key not in _WHOLE:
                yield from unread_fields(item, name)
            elif key in value.unread and key not in _UNREPORTED and item not in (None, "", [], {}):
                yield name


def role_of(message: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the field that holds a message's role, and its value."""
    return next(((key, message.get(key)) for key in _TEXT_OF if message.get(key) is not None), ("role", None))


def read_message(where: str, record: Mapping[str, Any]) -> ChatMessage:
    """Return a message of any of the forms; ``where`` is its place in the record, for errors."""
    key, name = role_of(record)
    role = ROLES.get(str(name))
    if role is None:
        raise ValueError(f"{where}.{key} is {name!r}: known are {', '.join(ROLES)}")
    field_name = f"{where}.{_TEXT_OF[key]}"
    content = record.get(_TEXT_OF[key]) or record.get("refusal")
    if role != "assistant":
        return ChatMessage(role, read_text(field_name, content), call_ids=id_of(record, "tool_call_id"))
    thoughts, content = _thoughts_apart(content)
    content = read_text(field_name, content)
    calls = parsed(f"{where}.tool_calls", record.get("tool_calls")) or []
    if record.get("function_call"):
        calls = [*calls, record.get("function_call")]
    if name in CALLING_ROLES:
        spoken = parsed(field_name, content)
        calls, content = [*calls, *(spoken if isinstance(spoken, list) else [spoken])], ""
    read = [_call(f"{where}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    ids = tuple(name for call in calls for name in id_of(call, "id", "tool_call_id"))
    thought = next((record.get(key) for key in ("reasoning_content", "reasoning", "thinking") if record.get(key)), "")
    if not isinstance(thought, str):
        raise ValueError(f"{where}: its reasoning is not text but {kind_of(thought)}")
    return ChatMessage(role, content, tuple(read), thought or "\n".join(thoughts), ids)


def id_of(record: Mapping[str, Any], *keys: str) -> tuple[str]:
    """Return the id of a call, or of the call that a result answers; "" if there is no id."""
    return (next((str(record.get(key)) for key in keys if record.get(key) is not None), ""),)


def _thoughts_apart(content: Any) -> tuple[list[str], Any]:
    """Return the texts of the parts that are thinking, and the other parts."""
    if not isinstance(content, list):
        return [], content
    thoughts, others = list[str](), list[Any]()
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind, part.get("text")) if kind in _THOUGHT_PARTS else None
        if isinstance(text, str):
            thoughts.append(text)
        else:
            others.append(part)
    return thoughts, others


def read_text(where: str, content: Any) -> str:
    """Return the text of a message's content: text, null or a list of parts that are text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} is {kind_of(content)}: it must be text, parts or null")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ValueError(f"{where}[{number}] is {kind or kind_of(part)}: only text can be learned from")
    return "".join(texts)


def _call(where: str, value: Any) -> ToolCall:
    call = value.get("function", value) if isinstance(value, dict) else value
    name = call.get("name", call.get("function_name")) if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"{where} names no function")
    arguments = call.get("arguments")
    if arguments in (None, ""):
        return ToolCall(name, {})
    read = parsed(f"{where}.arguments", arguments)
    if not isinstance(read, dict):
        raise ValueError(f"{where}.arguments is {kind_of(read)}: it must be an object")
    return ToolCall(name, read if isinstance(arguments, str) else _without_blanks(read))


def parsed(where: str, value: Any) -> Any:
    """Return a value; if it is a text of JSON, parse it first."""
    if not isinstance(value, str):
        return value
    with raised_as(ValueError, f"{where} is not JSON: ", ValueError, RecursionError):
        return json.loads(value)


def read_tools(record: Mapping[str, Any], key: str = "tools") -> list[dict[str, Any]]:
    """Return the schemas of a record's tools, each in OpenAI's wrapping."""
    schemas = parsed(key, record.get(key) or record.get("functions") or [])
    if not isinstance(schemas, list):
        raise ValueError(f"{key} is {kind_of(schemas)}: it must be a list of schemas")
    tools = []
    for number, tool in enumerate(schemas):
        inner = (tool.get("function") or tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ValueError(f"{key}[{number}] names no function")
        own = {name: value for name, value in _without_blanks(inner).items() if name != "type"}
        tools.append({"type": "function", "function": own})
    return tools


def _without_blanks(value: Any) -> Any:
    """Return the value without the nulls that a table adds for fields of other rows."""
    if isinstance(value, dict):
        return {key: _without_blanks(item) for key, item in value.items() if item is not None}
    return [_without_blanks(item) for item in value] if isinstance(value, list) else value


def objects_in(record: dict[str, Any], key: str) -> list[Any]:
    """Return a field that holds objects."""
    value = record.get(key)
    if isinstance(value, str):  # in a table whose column is text
        value = record[key] = tracked(parsed(key, value))
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {kind_of(value) if value != [] else 'empty'}: it must be a list")
    return [checked_object(f"{key}[{number}]", each) for number, each in enumerate(value)]


def checked_object(where: str, value: Any) -> Any:
    """Return the value, which must be an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {kind_of(value)}: it must be an object")
    return value


def kind_of(value: Any) -> str:
    """Return the name of a value's kind in JSON."""
    names = {str: "text", dict: "an object", list: "a list", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")
