"""OpenAI's responses: ``/v1/responses``. An item is a message, a thought, a call or its output; a turn is several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Annotated, Any

from pydantic import Field

from model_families.chat.messages import ChatMessage
from rollout_server.endpoint.dialects.dialect import (
    TURN_ID,
    Dialect,
    Recall,
    RequestBody,
    arguments_text,
    event,
    offered_tools,
    token_logprobs,
)
from rollout_server.endpoint.messages import BadMessages, call_id, loaded_tool, read_call, read_heard, read_message
from rollout_server.endpoint.wire import Answer, ApiError, Asked, Choice

LOGPROBS = "message.output_text.logprobs"
SEARCH = "tool_search"
"""The name by which the policy is offered an agent's search for tools."""
SUMMARISE = (
    "Summarise this conversation for yourself: what was asked, what was done and found out, and what is left to do. "
    "Answer with the summary alone: it takes the place of all that stands before it."
)
SUMMARY = "Your own summary of the conversation so far:"
_RESPONSE = re.compile(rf"resp_({TURN_ID})")
_ITEM = re.compile(rf"(rs|msg|fc)_({TURN_ID})(?:_(\d{{1,9}}))?")


class _ResponsesBody(RequestBody):
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
        given = _ResponsesBody.parse(body)
        if given.conversation is not None or given.prompt is not None or given.background:
            why = "conversation, prompt and background: send the items, and wait for the answer"
            raise ApiError(400, "unsupported", why)
        searches = [tool for tool in given.tools or [] if tool.get("type") == "tool_search"]
        agent_searches = any(tool.get("execution") == "client" for tool in searches)
        flat = list(_flat(given.tools or [], agent_searches))
        tools = offered_tools([tool for tool, _ in flat], "function", None, "parameters", agent_searches)
        items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
        said = [*_before(given.previous_response_id, recall), *_read_items(items, recall)]
        if not said:
            raise BadMessages("input must hold at least one item")
        form = (given.text or {}).get("format")
        return Asked(
            said=tuple(said),
            instructions=given.instructions,
            tools=tools.offered,
            called_as={tool["name"]: called for tool, called in (*flat, *_flat(_found(items))) if called},
            compacts=any(item.get("type") == "compaction_trigger" for item in items),
            model=given.model,
            stream=bool(given.stream),
            token_limit=given.max_output_tokens,
            logprobs=LOGPROBS in (given.include or []),
            settings=given.settings(
                response_format=None if form in (None, {"type": "text"}) else form, tools=tools.others
            ),
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
            "output": [_compaction(choice)] if asked.compacts else _items(choice, asked),
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

    def failure(self, error: ApiError) -> bytes:
        told = {"code": error.code, "message": str(error), "param": None}
        return event({"type": "error", "sequence_number": 0, **told}, "error")


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
            case {"type": "function_call", "name": str(name)} | {"type": "tool_search_call" as name}:
                named = SEARCH if name == "tool_search_call" else _joined(item.get("namespace"), name)
                call = read_call(named, item.get("arguments"), where)
                part = ChatMessage("assistant", "", (call,), call_ids=_of_call(item))
            case {"type": "function_call_output"}:
                part = ChatMessage("tool", read_heard(item.get("output"), where), call_ids=_of_call(item))
            case {"type": "tool_search_output", "tools": list(found)}:
                part = ChatMessage("tool", _loaded(found), call_ids=_of_call(item))
            case {"type": "compaction_trigger"}:
                part = ChatMessage("user", SUMMARISE)
            case {"type": "compaction", "encrypted_content": str(summary)}:
                part = ChatMessage("user", f"{SUMMARY}\n{summary}")
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


def _of_call(item: dict[str, Any]) -> tuple[str]:
    return (call_id(item.get("call_id")),)


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


def _flat(tools: Iterable[Any], agent_searches: bool = False) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The tools, those of namespaces and the agent's own search as functions, and how a call of each is told."""
    for tool in tools:
        match tool:
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                for each in inner:
                    if isinstance(each, dict) and isinstance(name := each.get("name"), str):
                        texts = (text for text in (tool.get("description"), each.get("description")) if text)
                        described = {"name": _joined(namespace, name), "description": "\n".join(map(str, texts))}
                        yield {**each, **described}, {"name": name, "namespace": namespace}
            case {"type": "tool_search"} if agent_searches:
                called_as = {"type": "tool_search_call", "execution": "client"}
                yield {**tool, "type": "function", "name": SEARCH}, called_as
            case dict():
                yield tool, {}
            case _:
                raise BadMessages("tools must be objects")


def _joined(namespace: object, name: str) -> str:
    if not isinstance(namespace, str):
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def _found(items: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """The tools that an agent's searches have found."""
    for item in items:
        if item.get("type") == "tool_search_output" and isinstance(tools := item.get("tools"), list):
            yield from tools


def _loaded(found: Iterable[Any]) -> str:
    """What a search for tools has found, as the policy is told of it."""
    flat = [tool for tool, _ in _flat(found)]
    tools = offered_tools(flat, "function", None, "parameters", agent_searches=False).offered
    return "\n".join(loaded_tool(tool["function"]["name"], tool) for tool in tools) or "No tool was found."


def _compaction(choice: Choice) -> dict[str, Any]:
    """A summary as the item that takes the place of what it sums up."""
    return {"id": f"cmp_{choice.turn_id}", "type": "compaction", "encrypted_content": choice.spoken.content}


def _items(choice: Choice, asked: Asked) -> list[dict[str, Any]]:
    turn_id, spoken, items = choice.turn_id, choice.spoken, list[dict[str, Any]]()
    status = "incomplete" if choice.finish == "length" else "completed"
    if spoken.reasoning:
        thought = [{"type": "reasoning_text", "text": spoken.reasoning}]
        items.append({"id": f"rs_{turn_id}", "type": "reasoning", "summary": [], "content": thought, "status": status})
    if spoken.content or not spoken.calls:
        told = token_logprobs(choice) if asked.logprobs else []
        text = {"type": "output_text", "text": spoken.content, "annotations": [], "logprobs": told}
        message = {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "content": [text]}
        items.append({**message, "status": status})
    for place, call in enumerate(spoken.calls):
        named = {"id": f"fc_{turn_id}_{place}", "call_id": spoken.call_ids[place], "name": call.name}
        called = {**named, "type": "function_call", "status": "completed", **asked.called_as.get(call.name, {})}
        as_text = called["type"] == "function_call"
        items.append({**called, "arguments": arguments_text(call.arguments) if as_text else call.arguments})
    return items


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it begins."""
    match item["type"]:
        case "compaction" | "tool_search_call":
            return item
        case "function_call":
            return {**item, "status": "in_progress", "arguments": ""}
    return {**item, "status": "in_progress", "content": []}


def _streamed(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, data) of the events between an item's beginning and its end."""
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    for index, part in enumerate(item.get("content", [])):
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
