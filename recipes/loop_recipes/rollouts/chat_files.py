"""Conversations in files of others: OpenAI's messages, ShareGPT, ATIF trajectories and verifiers' traces.

A line of JSONL, a row of parquet, or a whole JSON file is a record, and its fields show its form. A record that cannot
be read is one error that names file, line and field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_environments.tool_calls import split_tool_responses
from loop_plumbing.bounded_work import TooMuch, bounded
from loop_plumbing.json_lines import json_lines, most_unpacked, open_text
from loop_recipes.rollouts.chat_messages import (
    CALLING_ROLES,
    checked_object,
    id_of,
    kind_of,
    objects_in,
    read_message,
    read_text,
    read_tools,
    role_of,
    tracked,
    unread_fields,
)
from model_families.chat.messages import ChatMessage, results_by_call

TABLE_CPU_S = 3600.0
"""CPU seconds to read a table, which is as long as its owner has made it."""
_WEIGHTS = ("weight", "loss", "train", "training", "loss_mask", "step_loss_mask")
"""The fields that may hold a message's weight in learning."""


@dataclass(frozen=True)
class ChatTokens:
    """The ids [s] of a conversation's sequence: ``spans`` are (message, start, end) of the turns, and ``logprobs`` [s]
    the sampler's, 0 where it did not sample."""

    token_ids: list[int]
    spans: list[tuple[int, int, int]]
    logprobs: list[float]


@dataclass(frozen=True)
class Chat:
    """A conversation: ``place`` names its file and line.

    ``weights`` maps places of assistant messages to weights other than 1; a message of weight 0 is not learned from.
    ``tokens`` are the sequences in which the learned messages were sampled, () if the file lacks the ids of any such
    message (``in_part``: it has some). ``reward`` is in [0, 1]. ``unread`` names the file's fields that were not read.
    """

    place: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = field(default_factory=list)
    weights: Mapping[int, float] = field(default_factory=dict)
    tokens: tuple[ChatTokens, ...] = ()
    in_part: bool = False
    reward: float = 1.0
    unread: frozenset[str] = frozenset()


def read_chats(file: Path, vocabulary: int) -> Iterator[Chat]:
    """Yield the conversations of a file, in its order.

    Args:
        vocabulary: all token ids must be below this number.

    Raises:
        ValueError: the file cannot be read, or a record is not a conversation; the message names file, line and field.
    """
    for place, raw in _records(file):
        record = tracked(raw)
        try:
            chats = [*_chats(place, record, vocabulary)]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{place}: {type(error).__name__} {error}: not in the form that it seems to be of"
            ) from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        unread = frozenset(unread_fields(record))
        for chat in chats:
            if stray := _unknown_results(chat.messages):
                raise ValueError(f"{place}: a tool's message answers call {stray[0]!r}, which no call before it has")
            yield replace(chat, messages=results_by_call(chat.messages), unread=unread)


def _unknown_results(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the ids in tools' messages that no earlier call has; skip messages before the first call with an id."""
    calls, unknown = {""}, list[str]()
    for message in messages:
        if message.role == "assistant":
            calls |= {*message.call_ids}
        elif message.role == "tool" and calls > {""}:
            unknown += [name for name in message.call_ids if name not in calls]
    return unknown


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    if file.suffix == ".parquet":
        try:
            from pyarrow.parquet import read_table
        except ImportError as error:
            raise ValueError(f"{file} is parquet, which pyarrow reads: install it, or give JSONL") from error
        try:
            with bounded(TABLE_CPU_S, most_unpacked(file)):
                rows = read_table(file).to_pylist()
        except TooMuch as error:
            raise ValueError(f"{file} {error} to unpack: give it as JSONL, if it is yours") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not a parquet file: {str(error).splitlines()[0]}") from error
        yield from ((f"{file}:{number}", row) for number, row in enumerate(rows, start=1))
        return
    if file.suffix == ".json":
        try:
            whole = json.loads(open_text(file).read())
        except (ValueError, RecursionError) as error:
            if not str(error).startswith("Extra data"):  # raised by JSON lines under another name
                raise ValueError(f"{file} is not JSON: {error}") from error
        else:
            records = whole if isinstance(whole, list) else [whole]
            yield from ((f"{file}[{number}]", record) for number, record in enumerate(records))
            return
    yield from ((f"{file}:{number}", record) for number, record in json_lines(file))


def _chats(place: str, record: Any, vocabulary: int) -> Iterator[Chat]:
    if not isinstance(record, dict):
        raise ValueError(f"a record is an object, not {kind_of(record)}")
    if str(record.get("schema_version", "")).startswith("ATIF"):
        yield _read_atif(place, record, vocabulary)
    elif record.get("traces") is not None:
        for number, trace in enumerate(objects_in(record, "traces")):
            yield from _read_trace(f"{place} traces[{number}]", trace, vocabulary)
    elif record.get("nodes") is not None:
        yield from _read_trace(place, record, vocabulary)
    elif isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        yield _read_messages(place, record, "prompt", "completion")
    elif key := next((key for key in ("messages", "conversations", "conversation") if record.get(key) is not None), ""):
        yield _read_messages(place, record, key)
    else:
        there = ", ".join(map(str, record)) or "none"
        raise ValueError(f"no messages, conversations, steps of ATIF or traces among its fields ({there})")


# OpenAI's messages, and ShareGPT's


def _read_messages(place: str, record: dict[str, Any], *keys: str) -> Chat:
    messages = [ChatMessage("system", system)] if (system := read_text("system", record.get("system"))) else []
    weights: dict[int, float] = {}
    for where, each in ((f"{key}[{n}]", each) for key in keys for n, each in enumerate(objects_in(record, key))):
        message = read_message(where, each)
        if [message] == messages and message.role == "system":  # beside the messages, and among them
            continue
        if role_of(each)[1] in CALLING_ROLES and messages and messages[-1].role == "assistant":
            before = messages.pop()
            ids = before.call_ids + message.call_ids
            message = replace(before, calls=before.calls + message.calls, call_ids=ids)
        if (weight := _weight(where, each)) != 1:
            weights[len(messages)] = weight
        results = split_tool_responses(message.content.strip()) if message.role == "tool" else None
        messages += [message] if results is None else [ChatMessage("tool", result) for result in results]
    return Chat(place, messages, read_tools(record), weights)


def _weight(where: str, message: Mapping[str, Any]) -> float:
    """Return a message's weight in learning, by default 1."""
    weights = {key: weight for key in _WEIGHTS if (weight := message.get(key)) is not None}
    for key, weight in weights.items():
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{where}.{key} is {weight!r}: it must be a number, 0 to leave the message out")
    if (mask := message.get("mask")) is not None:
        raise ValueError(f"{where}.mask is {kind_of(mask)}: write weight in its place, 0 to leave the message out")
    if len({*weights.values()}) > 1:
        raise ValueError(f"{where}: {' and '.join(f'{key} is {weight}' for key, weight in weights.items())}: keep one")
    return float(next(iter(weights.values()), 1.0))


# ATIF


def _read_atif(place: str, record: dict[str, Any], vocabulary: int) -> Chat:
    """Read a trajectory. A step whose prompt does not go on from the ids before it begins another sequence."""
    messages: list[ChatMessage] = []
    stored: list[ChatTokens] = []
    weights: dict[int, float] = {}
    without = 0
    for number, step in enumerate(objects_in(record, "steps")):
        where = f"steps[{number}]"
        message = read_message(where, step)
        if message.role == "assistant":
            metrics = step.get("metrics") or {}
            if step.get("is_copied_context") or step.get("llm_call_count") == 0:
                weights[len(messages)] = 0.0
            elif metrics.get("prompt_token_ids") and metrics.get("completion_token_ids"):
                _add_tokens(f"{where}.metrics", stored, len(messages), metrics, vocabulary)
            else:
                without += 1
        messages.append(message)
        for n, result in enumerate((step.get("observation") or {}).get("results") or ()):
            content = read_text(f"{where}.observation.results[{n}].content", result.get("content"))
            messages.append(ChatMessage("tool", content, call_ids=id_of(result, "source_call_id")))
    tools = read_tools(record.get("agent") or {}, "tool_definitions")
    tokens = () if without else tuple(stored)
    return Chat(place, messages, tools, weights, tokens, bool(without and stored))


def _add_tokens(where: str, stored: list[ChatTokens], place: int, metrics: Mapping[str, Any], vocabulary: int) -> None:
    """Add a step's ids to the sequence that the step's prompt continues, or begin another sequence."""
    prompt, sampled = (_ids(where, metrics, key, vocabulary) for key in ("prompt_token_ids", "completion_token_ids"))
    logprobs = _logprobs(where, metrics) or [0.0] * len(sampled)
    if len(logprobs) != len(sampled):
        raise ValueError(f"{where}: {len(sampled)} completion_token_ids and {len(logprobs)} logprobs")
    before = stored[-1] if stored else None
    if before is None or prompt[: len(before.token_ids)] != before.token_ids:
        before = ChatTokens([], [], [])
    else:
        stored.pop()
    ids = [*prompt, *sampled]
    blank = [0.0] * (len(prompt) - len(before.token_ids))
    spans = [*before.spans, (place, len(prompt), len(ids))]
    stored.append(ChatTokens(ids, spans, [*before.logprobs, *blank, *logprobs]))


# verifiers


def _read_trace(place: str, trace: dict[str, Any], vocabulary: int) -> Iterator[Chat]:
    """Read the paths of a trace's tree of messages; a sampled node is learned from on its first path only."""
    nodes = objects_in(trace, "nodes")
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
        reward = min(max(reward, 0.0), 1.0)
        yield _read_path(f"{place} nodes[{leaf}]", trace, [*reversed(path)], seen, reward, vocabulary)
        seen |= set(path)


def _read_path(
    place: str, trace: Mapping[str, Any], path: Sequence[int], seen: set[int], reward: float, vocabulary: int
) -> Chat:
    nodes = trace["nodes"]
    messages, weights = list[ChatMessage](), dict[int, float]()
    ids, spans, logprobs = list[int](), list[tuple[int, int, int]](), list[float]()
    known, without = True, 0
    for number in path:
        node = nodes[number]
        where = f"nodes[{number}]"
        message = read_message(f"{where}.message", checked_object(f"{where}.message", node.get("message")))
        learned = bool(node.get("sampled")) and message.role == "assistant" and number not in seen
        if message.role == "assistant" and not learned:
            weights[len(messages)] = 0.0
        node_ids, mask = _ids(where, node, "token_ids", vocabulary), node.get("mask") or []
        own = sum(map(bool, mask))
        own_logprobs = _logprobs(where, node) or [0.0] * own
        if len(mask) != len(node_ids) or len(own_logprobs) != own:
            raise ValueError(
                f"{where}: {len(node_ids)} token_ids, {len(mask)} of mask, {own} sampled, {len(own_logprobs)} logprobs"
            )
        if own and not all(mask[-own:]):
            raise ValueError(f"{where}.mask: the sampled tokens do not stand at the end")
        known = known and bool(node_ids)  # what follows the last answer was never encoded
        if known:
            start = len(ids) + len(node_ids) - own
            ids = [*ids, *node_ids]
            sampled = learned and own > 0
            logprobs = [*logprobs, *[0.0] * (len(node_ids) - own), *(own_logprobs if sampled else [0.0] * own)]
            if sampled:
                spans.append((len(messages), start, len(ids)))
        without += learned and not (known and own > 0)
        messages.append(message)
    tools = read_tools(nodes[path[0]]) or read_tools(trace)
    tokens = (ChatTokens(ids, spans, logprobs),) if spans and not without else ()
    return Chat(place, messages, tools, weights, tokens, bool(spans and without), reward)


def _ids(where: str, record: Mapping[str, Any], key: str, vocabulary: int) -> list[int]:
    ids = record.get(key) or []
    for number, each in enumerate(ids):
        if type(each) is not int or not 0 <= each < vocabulary:
            raise ValueError(
                f"{where}.{key}[{number}] is {each!r}, and the ids of the model are whole numbers from 0 to "
                f"{vocabulary - 1}; name the model that sampled it"
            )
    return ids


def _logprobs(where: str, record: Mapping[str, Any]) -> list[float]:
    logprobs = record.get("logprobs") or []
    for number, each in enumerate(logprobs):
        if type(each) not in (int, float) or not -math.inf < each <= 1e-6:
            raise ValueError(f"{where}.logprobs[{number}] is {each!r}: a log-prob is a number of at most 0")
    return logprobs
