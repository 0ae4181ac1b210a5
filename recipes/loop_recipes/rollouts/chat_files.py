"""Conversations in files of others: OpenAI's messages, ShareGPT, ATIF trajectories and verifiers' traces.

A line of JSONL, a row of parquet, or a whole JSON file is a record, and its fields say which of them it is. What cannot
be read is one error that names file, line and field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_environments.tool_calls import ToolCall
from model_families.chat.messages import ChatMessage, ChatRole

ROLES: Mapping[str, ChatRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "agent": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""The names of roles in OpenAI's API, ShareGPT and ATIF."""
_THOUGHT_PARTS = ("thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class StoredTokens:
    """The ids [s] that a model was served and sampled: ``spans`` are the [start, end) of sampled turns, ``messages``
    the place of each in its conversation, and ``logprobs`` [s] the sampler's, 0 where it did not sample."""

    token_ids: list[int]
    spans: list[tuple[int, int]]
    messages: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Chat:
    """A conversation: ``place`` names its file and line.

    ``weights`` are those of assistant messages by their places, where it is not 1; one of 0 is not learned from.
    ``tokens`` are the sequences in
    which the learned ones were sampled, () where the file does not have the ids of all of them (``in_part``: of some).
    ``reward`` is in [0, 1].
    """

    place: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = field(default_factory=list)
    weights: Mapping[int, float] = field(default_factory=dict)
    tokens: tuple[StoredTokens, ...] = ()
    in_part: bool = False
    reward: float = 1.0


def read_chats(file: Path) -> Iterator[Chat]:
    """The conversations of a file, in its order.

    Raises:
        ValueError: it cannot be read, or a record is no conversation; names file, line and field.
    """
    for place, record in _records(file):
        try:
            yield from _chats(place, record)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{place}: {type(error).__name__} {error}: not in the form that it seems to be of"
            ) from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    if not file.is_file():
        raise ValueError(f"{file} is no file")
    if file.suffix == ".parquet":
        try:
            from pyarrow.parquet import read_table
        except ImportError as error:
            raise ValueError(f"{file} is parquet, which pyarrow reads: install it, or give JSONL") from error
        try:
            rows = read_table(file).to_pylist()
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no parquet file: {str(error).splitlines()[0]}") from error
        yield from ((f"{file}:{number}", _without_blanks(row)) for number, row in enumerate(rows, start=1))
        return
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix == ".json":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is no JSON: {error}") from error
        records = whole if isinstance(whole, list) else [whole]
        yield from ((f"{file}[{number}]", record) for number, record in enumerate(records))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{file}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}:{number} is no JSON: {error}") from error


def _without_blanks(value: Any) -> Any:
    """A row without the nulls that a table puts where another row has a field."""
    if isinstance(value, dict):
        return {key: _without_blanks(item) for key, item in value.items() if item is not None}
    return [_without_blanks(item) for item in value] if isinstance(value, list) else value


def _chats(place: str, record: Any) -> Iterator[Chat]:
    if not isinstance(record, dict):
        raise ValueError(f"a record is an object, not {_kind(record)}")
    if str(record.get("schema_version", "")).startswith("ATIF"):
        yield _of_atif(place, record)
    elif "traces" in record:
        for number, trace in enumerate(_list(record, "traces")):
            yield from _of_trace(f"{place} traces[{number}]", trace)
    elif "nodes" in record:
        yield from _of_trace(place, record)
    elif "messages" in record:
        yield _of_messages(place, record, "messages", _list(record, "messages"))
    elif isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        yield _of_messages(place, record, "prompt + completion", [*record["prompt"], *record["completion"]])
    elif "conversations" in record or "conversation" in record:
        key = "conversations" if "conversations" in record else "conversation"
        yield _of_sharegpt(place, record, key)
    else:
        there = ", ".join(map(str, record)) or "none"
        raise ValueError(f"no messages, conversations, steps of ATIF or traces among its fields ({there})")


# OpenAI's messages, and ShareGPT's


def _of_messages(place: str, record: Mapping[str, Any], key: str, given: Sequence[Any]) -> Chat:
    messages = [_message(f"{key}[{number}]", each) for number, each in enumerate(given)]
    return Chat(place, messages, _tools(record), _weights(key, given))


def _weights(key: str, given: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The weights of messages that have one; null is none, as a table writes it."""
    weights = {}
    for number, each in enumerate(given):
        if (weight := each.get("weight")) is None:
            continue
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{key}[{number}].weight is {weight!r}: it must be a number, 0 to leave the message out")
        if weight != 1:
            weights[number] = float(weight)
    return weights


def _message(where: str, given: Any) -> ChatMessage:
    if not isinstance(given, dict):
        raise ValueError(f"{where} is no message but {_kind(given)}")
    role = ROLES.get(str(given.get("role")))
    if role is None:
        raise ValueError(f"{where}.role is {given.get('role')!r}: known are {', '.join(ROLES)}")
    content = given.get("content") or given.get("refusal")
    if role != "assistant":
        return ChatMessage(role, _text(f"{where}.content", content))
    thoughts, content = _thoughts_apart(content)
    content = _text(f"{where}.content", content)
    calls = [_call(f"{where}.tool_calls[{n}]", call) for n, call in enumerate(given.get("tool_calls") or ())]
    if given.get("function_call"):
        calls.append(_call(f"{where}.function_call", given["function_call"]))
    thought = next((given[key] for key in ("reasoning_content", "reasoning", "thinking") if given.get(key)), "")
    if not isinstance(thought, str):
        raise ValueError(f"{where}: its reasoning is no text but {_kind(thought)}")
    return ChatMessage(role, content, tuple(calls), thought or "\n".join(thoughts))


def _thoughts_apart(content: Any) -> tuple[list[str], Any]:
    """The texts of the parts that are thinking, and the other parts."""
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


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} is {_kind(content)}: it must be text, parts or null")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ValueError(f"{where}[{number}] is {kind or _kind(part)}: only text can be learned from")
    return "".join(texts)


def _call(where: str, given: Any) -> ToolCall:
    call = given.get("function", given) if isinstance(given, dict) else given
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"{where} names no function")
    return ToolCall(call["name"], _arguments(f"{where}.arguments", call.get("arguments")))


def _arguments(where: str, given: Any) -> dict[str, Any]:
    if given in (None, ""):
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {_kind(given)}: it must be an object")
    return given


def _tools(record: Mapping[str, Any], key: str = "tools") -> list[dict[str, Any]]:
    given = record.get(key) or record.get("functions") or []
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"{key} is no JSON: {error}") from error
    if not isinstance(given, list):
        raise ValueError(f"{key} is {_kind(given)}: it must be a list of schemas")
    tools = []
    for number, tool in enumerate(given):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ValueError(f"{key}[{number}] names no function")
        own = {name: value for name, value in inner.items() if name != "type"}
        tools.append({"type": "function", "function": own})
    return tools


def _of_sharegpt(place: str, record: Mapping[str, Any], key: str) -> Chat:
    given = _list(record, key)
    if any(isinstance(each, dict) and "role" in each for each in given):
        return _of_messages(place, record, key, given)
    messages = []
    if isinstance(record.get("system"), str) and record["system"]:
        messages.append(ChatMessage("system", record["system"]))
    for number, each in enumerate(given):
        where = f"{key}[{number}]"
        if not isinstance(each, dict) or "from" not in each:
            raise ValueError(f"{where} has no from")
        role = ROLES.get(str(each["from"]))
        if role is None:
            raise ValueError(f"{where}.from is {each['from']!r}: known are {', '.join(ROLES)}")
        value = _text(f"{where}.value", each.get("value"))
        if each["from"] == "function_call":
            messages.append(ChatMessage(role, "", (_call(where, _arguments(f"{where}.value", value)),)))
        else:
            messages.append(ChatMessage(role, value))
    first = len(messages) - len(given)
    weights = {first + number: weight for number, weight in _weights(key, given).items()}
    return Chat(place, messages, _tools(record), weights)


# ATIF


def _of_atif(place: str, record: Mapping[str, Any]) -> Chat:
    """A trajectory. A step whose prompt does not go on from the ids before it begins another sequence."""
    messages: list[ChatMessage] = []
    stored: list[StoredTokens] = []
    weights: dict[int, float] = {}
    without = 0
    for number, step in enumerate(_list(record, "steps")):
        where = f"steps[{number}]"
        role = ROLES.get(str(step.get("source")))
        if role is None:
            raise ValueError(f"{where}.source is {step.get('source')!r}: it must be system, user or agent")
        text = _text(f"{where}.message", step.get("message"))
        if role != "assistant":
            messages.append(ChatMessage(role, text))
        else:
            calls = [
                ToolCall(call["function_name"], _arguments(f"{where}.tool_calls[{n}].arguments", call.get("arguments")))
                for n, call in enumerate(step.get("tool_calls") or ())
            ]
            metrics = step.get("metrics") or {}
            if step.get("is_copied_context"):
                weights[len(messages)] = 0.0
            elif metrics.get("prompt_token_ids") and metrics.get("completion_token_ids"):
                _add_tokens(where, stored, len(messages), metrics)
            else:
                without += 1
            messages.append(ChatMessage(role, text, tuple(calls), step.get("reasoning_content") or ""))
        for n, result in enumerate((step.get("observation") or {}).get("results") or ()):
            content = _text(f"{where}.observation.results[{n}].content", result.get("content"))
            messages.append(ChatMessage("tool", content))
    tools = _tools(record.get("agent") or {}, "tool_definitions")
    tokens = () if without else tuple(stored)
    return Chat(place, messages, tools, weights, tokens, bool(without and stored))


def _add_tokens(where: str, stored: list[StoredTokens], place: int, metrics: Mapping[str, Any]) -> None:
    """Add a step's ids to the sequence that its prompt goes on from, or as another one."""
    prompt, sampled = metrics["prompt_token_ids"], metrics["completion_token_ids"]
    found = metrics.get("logprobs") or [0.0] * len(sampled)
    if len(found) != len(sampled):
        raise ValueError(f"{where}.metrics: {len(sampled)} completion_token_ids and {len(found)} logprobs")
    before = stored[-1] if stored else None
    if before is None or prompt[: len(before.token_ids)] != before.token_ids:
        before = StoredTokens([], [], [], [])
    else:
        stored.pop()
    ids = [*prompt, *sampled]
    blank = [0.0] * (len(prompt) - len(before.token_ids))
    spans, places = [*before.spans, (len(prompt), len(ids))], [*before.messages, place]
    stored.append(StoredTokens(ids, spans, places, [*before.logprobs, *blank, *found]))


# verifiers


def _of_trace(place: str, trace: Mapping[str, Any]) -> Iterator[Chat]:
    """The paths of a trace's tree of messages; what a node sampled is learned from on the first path that has it."""
    nodes = _list(trace, "nodes")
    parents = {node.get("parent") for node in nodes}
    reward = 0.0
    for name, each in (trace.get("rewards") or {}).items():
        if each is not None:
            reward += float(each["score"]) * float(each.get("weight", 1.0))
        elif not trace.get("is_completed"):
            raise ValueError(f"rewards.{name} is null in a trace that is not complete")
    seen: set[int] = set()
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path: list[int] = []
        node: int | None = leaf
        while node is not None:
            if node in path:
                raise ValueError(f"nodes[{node}].parent leads back to it")
            path.append(node)
            node = nodes[node].get("parent")
        yield _of_path(f"{place} nodes[{leaf}]", trace, [*reversed(path)], seen, min(max(reward, 0.0), 1.0))
        seen |= set(path)


def _of_path(place: str, trace: Mapping[str, Any], path: Sequence[int], seen: set[int], reward: float) -> Chat:
    nodes = trace["nodes"]
    messages, weights, spans, places = list[ChatMessage](), dict[int, float](), list[tuple[int, int]](), list[int]()
    ids, logprobs = list[int](), list[float]()
    known, without = True, 0
    for number in path:
        node = nodes[number]
        where = f"nodes[{number}]"
        message = _message(f"{where}.message", node.get("message"))
        learned = message.role == "assistant" and number not in seen and bool(node.get("sampled"))
        if message.role == "assistant" and not learned:
            weights[len(messages)] = 0.0
        given, mask = node.get("token_ids") or [], node.get("mask") or []
        own = sum(map(bool, mask))
        found = node.get("logprobs") or [0.0] * own
        if len(mask) != len(given) or len(found) != own:
            raise ValueError(
                f"{where}: {len(given)} token_ids, {len(mask)} of mask, {own} sampled, {len(found)} logprobs"
            )
        if own and not all(mask[-own:]):
            raise ValueError(f"{where}.mask: what was sampled does not stand at the end")
        known = known and bool(given)  # what follows the last answer was never encoded
        if known:
            start = len(ids) + len(given) - own
            ids = [*ids, *given]
            sampled = learned and own > 0
            logprobs = [*logprobs, *[0.0] * (len(given) - own), *(found if sampled else [0.0] * own)]
            if sampled:
                spans.append((start, len(ids)))
                places.append(len(messages))
        without += learned and not (known and own > 0)
        messages.append(message)
    tools = _tools(nodes[path[0]]) or _tools(trace)
    tokens = (StoredTokens(ids, spans, places, logprobs),) if spans and not without else ()
    return Chat(place, messages, tools, weights, tokens, bool(spans and without), reward)


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    if isinstance(value, str):  # of a table whose column is text
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{key} is text that is no JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {_kind(value) if value != [] else 'empty'}: it must be a list")
    return value


def _kind(value: Any) -> str:
    names = {str: "text", dict: "an object", list: "a list", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")
