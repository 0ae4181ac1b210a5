"""OpenAI's responses: ``/v1/responses``. An item is a message, a thought, a call or its output; a turn is several."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Any

from pydantic import Field

from model_families.chat.messages import ChatMessage
from rollout_server.endpoint.dialects.dialect import (
    TURN_ID,
    Body,
    Dialect,
    Recall,
    arguments_text,
    event,
    offered_tools,
    token_logprobs,
)
from rollout_server.endpoint.messages import BadMessages, call_id, read_call, read_message, read_text
from rollout_server.endpoint.wire import Answer, ApiError, Asked, Choice

LOGPROBS = "message.output_text.logprobs"
_RESPONSE = re.compile(rf"resp_({TURN_ID})")
_ITEM = re.compile(rf"(rs|msg|fc)_({TURN_ID})(?:_(\d{{1,9}}))?")


class _Body(Body):
    input: str | list[dict[str, Any]] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None


class Responses(Dialect):
    """OpenAI's responses. Earlier answers of the episode can be referred to by their ids."""

    def _read(self, body: bytes, recall: Recall) -> Asked:
        given = _Body.parse(body)
        if given.conversation is not None or given.prompt is not None or given.background:
            why = "conversation, prompt and background: send the items, and wait for the answer"
            raise ApiError(400, "unsupported", why)
        tools, others = offered_tools(given.tools, "function", None, "parameters")
        items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
        said = [*_before(given.previous_response_id, recall), *_read_items(items, recall)]
        if not said:
            raise BadMessages("input must hold at least one item")
        form = (given.text or {}).get("format")
        return Asked(
            said=tuple(said),
            instructions=given.instructions,
            tools=tools,
            model=given.model,
            stream=bool(given.stream),
            token_limit=given.max_output_tokens,
            logprobs=LOGPROBS in (given.include or []),
            settings=given.settings(response_format=None if form in (None, {"type": "text"}) else form, tools=others),
        )

    def whole(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        [choice] = answer.choices
        cut = choice.finish == "length"
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": asked.instructions,
            "metadata": {},
            "output": _items(choice, asked.logprobs),
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": choice.thinking_tokens},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def events(self, asked: Asked, answer: Answer) -> Iterator[bytes]:
        numbers, whole = count(), self.whole(asked, answer)

        def told(kind: str, **data: Any) -> bytes:
            kind = f"response.{kind}"
            return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield told("created", response=begun)
        yield told("in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            yield told("output_item.added", output_index=index, item=_begun(item))
            for kind, data in _streamed(item):
                yield told(kind, **place, **data)
            yield told("output_item.done", output_index=index, item=item)
        yield told(whole["status"], response=whole)


def _before(response_id: str | None, recall: Recall) -> Sequence[ChatMessage]:
    """The conversation up to an earlier answer, and that answer."""
    if response_id is None:
        return ()
    found = _RESPONSE.fullmatch(response_id)
    known = recall(found[1]) if found else None
    if known is None:
        raise ApiError(404, "previous_response_not_found", f"no response {response_id[:40]!r} in this episode")
    return [*known.said, known.spoken]


def _read_items(items: Sequence[dict[str, Any]], recall: Recall) -> Iterator[ChatMessage]:
    """Messages; thought, message and calls of an assistant that follow each other are one turn."""
    turn: ChatMessage | None = None
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item.get("type") == "item_reference":
            item = _referred(item.get("id"), where, recall)
        match item:
            case {"type": "reasoning"}:
                part = ChatMessage("assistant", "")
            case {"type": "function_call", "name": str(name), "arguments": given}:
                part = ChatMessage(
                    "assistant", "", (read_call(name, given, where),), call_ids=(call_id(item.get("call_id")),)
                )
            case {"type": "function_call_output"}:
                part = ChatMessage("tool", read_text(item.get("output"), where))
            case {"type": "message"} | {"role": _}:
                part = read_message({"role": item.get("role"), "content": item.get("content")}, where)
            case _:
                kind = str(item.get("type"))[:40]
                raise BadMessages(f"{where} is of type {kind!r}; the policy reads messages, calls and their outputs")
        begins = part.role != "assistant" or item.get("type") == "reasoning" or not part.calls
        if turn is not None and begins and (part.role != "assistant" or turn.content or turn.calls):
            yield turn
            turn = None
        if part.role != "assistant":
            yield part
        elif turn is None:
            turn = part
        else:
            text = turn.content or part.content
            turn = ChatMessage("assistant", text, turn.calls + part.calls, call_ids=turn.call_ids + part.call_ids)
    if turn is not None:
        yield turn


def _referred(name: object, where: str, recall: Recall) -> dict[str, Any]:
    """The item of an earlier answer that has this id."""
    found = _ITEM.fullmatch(str(name))
    known = recall(found[2]) if found else None
    if found and known:
        kind, place, spoken = found[1], int(found[3] or 0), known.spoken
        if kind == "rs":
            return {"type": "reasoning"}
        if kind == "msg":
            return {"role": "assistant", "content": spoken.content}
        if place < len(spoken.calls):
            call = spoken.calls[place]
            named = {"call_id": spoken.call_ids[place], "name": call.name}
            return {"type": "function_call", **named, "arguments": call.arguments}
    raise BadMessages(f"{where}: no item {str(name)[:40]!r} in this episode; send it whole")


def _items(choice: Choice, logprobs: bool) -> list[dict[str, Any]]:
    turn_id, spoken, items = choice.turn_id, choice.spoken, list[dict[str, Any]]()
    status = "incomplete" if choice.finish == "length" else "completed"
    if spoken.reasoning:
        thought = [{"type": "reasoning_text", "text": spoken.reasoning}]
        items.append({"id": f"rs_{turn_id}", "type": "reasoning", "summary": [], "content": thought, "status": status})
    if spoken.content or not spoken.calls:
        told = token_logprobs(choice) if logprobs else []
        text = {"type": "output_text", "text": spoken.content, "annotations": [], "logprobs": told}
        message = {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "content": [text]}
        items.append({**message, "status": status})
    for place, call in enumerate(spoken.calls):
        named = {"id": f"fc_{turn_id}_{place}", "call_id": spoken.call_ids[place], "name": call.name}
        arguments = arguments_text(call.arguments)
        items.append({**named, "type": "function_call", "arguments": arguments, "status": "completed"})
    return items


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it begins."""
    return {**item, "status": "in_progress", **({"arguments": ""} if "arguments" in item else {"content": []})}


def _streamed(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, data) of the events between an item's beginning and its end."""
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    for index, part in enumerate(item["content"]):
        place = {"content_index": index}
        if item["type"] == "reasoning":
            yield "reasoning_text.delta", {**place, "delta": part["text"]}
            yield "reasoning_text.done", {**place, "text": part["text"]}
            continue
        yield "content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}
        if part["text"]:
            yield "output_text.delta", {**place, "delta": part["text"], "logprobs": part["logprobs"]}
        yield "output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
        yield "content_part.done", {**place, "part": part}
