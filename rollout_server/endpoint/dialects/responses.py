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
SEARCH_TOOL = "tool_search"
"""The name that an agent's search for tools has for the policy."""
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
    """OpenAI's responses API. A call can refer to earlier answers of the episode by their ids."""

    def _read(self, body: bytes, recall: Recall) -> Asked:
        request = _ResponsesBody.parse(body)
        if request.conversation is not None or request.prompt is not None or request.background:
            why = "conversation, prompt and background: send the items, and wait for the answer"
            raise ApiError(400, "unsupported", why)
        searches = [tool for tool in request.tools or [] if tool.get("type") == "tool_search"]
        agent_searches = any(tool.get("execution") == "client" for tool in searches)
        flat = list(_flat(request.tools or [], agent_searches))
        tools = offered_tools([tool for tool, _ in flat], "function", None, "parameters", agent_searches)
        items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
        messages = [*_before(request.previous_response_id, recall), *_read_items(items, recall)]
        if not messages:
            raise BadMessages("input must hold at least one item")
        form = (request.text or {}).get("format")
        return Asked(
            conversation=tuple(messages),
            instructions=request.instructions,
            tools=tools.offered,
            called_as={tool["name"]: called for tool, called in (*flat, *_flat(_searched_tools(items))) if called},
            compacts=any(item.get("type") == "compaction_trigger" for item in items),
            model=request.model,
            stream=bool(request.stream),
            token_limit=request.max_output_tokens,
            logprobs=LOGPROBS in (request.include or []),
            settings=request.settings(
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

        def numbered(kind: str, **data: Any) -> bytes:
            kind = f"response.{kind}"
            return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        start = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield numbered("created", response=start)
        yield numbered("in_progress", response=start)
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            yield numbered("output_item.added", output_index=index, item=_begun(item))
            for kind, data in _streamed(item):
                yield numbered(kind, **place, **data)
            yield numbered("output_item.done", output_index=index, item=item)
        yield numbered(whole["status"], response=whole)

    def failure(self, error: ApiError) -> bytes:
        fields = {"code": error.code, "message": str(error), "param": None}
        return event({"type": "error", "sequence_number": 0, **fields}, "error")


def _before(response_id: str | None, recall: Recall) -> Sequence[ChatMessage]:
    """Return the conversation that led to an earlier answer, and this answer."""
    if response_id is None:
        return ()
    match = _RESPONSE.fullmatch(response_id)
    recalled = recall(match[1]) if match else None
    if recalled is None:
        raise ApiError(404, "previous_response_not_found", f"no response {response_id[:40]!r} in this episode")
    return [*recalled.conversation, recalled.spoken]


def _read_items(items: Sequence[dict[str, Any]], recall: Recall) -> Iterator[ChatMessage]:
    """Yield messages. Consecutive thoughts, messages and calls of an assistant become one turn."""
    turn: ChatMessage | None = None
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item.get("type") == "item_reference":
            item = _referred(item.get("id"), where, recall)
        match item:
            case {"type": "reasoning"}:
                message = ChatMessage("assistant", "")
            case {"type": "function_call", "name": str(name)} | {"type": "tool_search_call" as name}:
                named = SEARCH_TOOL if name == "tool_search_call" else _joined(item.get("namespace"), name)
                call = read_call(named, item.get("arguments"), where)
                message = ChatMessage("assistant", "", (call,), call_ids=_call_ids(item))
            case {"type": "function_call_output"}:
                message = ChatMessage("tool", read_heard(item.get("output"), where), call_ids=_call_ids(item))
            case {"type": "tool_search_output", "tools": list(tools)}:
                message = ChatMessage("tool", _loaded(tools), call_ids=_call_ids(item))
            case {"type": "compaction_trigger"}:
                message = ChatMessage("user", SUMMARISE)
            case {"type": "compaction", "encrypted_content": str(summary)}:
                message = ChatMessage("user", f"{SUMMARY}\n{summary}")
            case {"type": "message"} | {"role": _}:
                message = read_message({"role": item.get("role"), "content": item.get("content")}, where)
            case _:
                kind = str(item.get("type"))[:40]
                raise BadMessages(f"{where} is of type {kind!r}; the policy reads messages, calls and their outputs")
        begins = message.role != "assistant" or item.get("type") == "reasoning" or not message.calls
        if turn is not None and begins and (message.role != "assistant" or turn.content or turn.calls):
            yield turn
            turn = None
        if message.role != "assistant":
            yield message
        elif turn is None:
            turn = message
        else:
            text = turn.content or message.content
            turn = ChatMessage("assistant", text, turn.calls + message.calls, call_ids=turn.call_ids + message.call_ids)
    if turn is not None:
        yield turn


def _call_ids(item: dict[str, Any]) -> tuple[str]:
    return (call_id(item.get("call_id")),)


def _referred(name: object, where: str, recall: Recall) -> dict[str, Any]:
    """Find the item with this id in the earlier answers, and return the item."""
    match = _ITEM.fullmatch(str(name))
    recalled = recall(match[2]) if match else None
    if match and recalled:
        kind, place, spoken = match[1], int(match[3] or 0), recalled.spoken
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
    """Yield each tool (namespaces' tools and the agent's search as functions) and the fields that its calls need."""
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
                yield {**tool, "type": "function", "name": SEARCH_TOOL}, called_as
            case dict():
                yield tool, {}
            case _:
                raise BadMessages("tools must be objects")


def _joined(namespace: object, name: str) -> str:
    if not isinstance(namespace, str):
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def _searched_tools(items: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yield the tools that an agent's searches have found."""
    for item in items:
        if item.get("type") == "tool_search_output" and isinstance(tools := item.get("tools"), list):
            yield from tools


def _loaded(searched: Iterable[Any]) -> str:
    """Return the text with which the policy learns the tools that a search has found."""
    flat = [tool for tool, _ in _flat(searched)]
    tools = offered_tools(flat, "function", None, "parameters", agent_searches=False).offered
    return "\n".join(loaded_tool(tool["function"]["name"], tool) for tool in tools) or "No tool was found."


def _compaction(choice: Choice) -> dict[str, Any]:
    """Return a summary in the form of the item that replaces the history."""
    return {"id": f"cmp_{choice.turn_id}", "type": "compaction", "encrypted_content": choice.spoken.content}


def _items(choice: Choice, asked: Asked) -> list[dict[str, Any]]:
    turn_id, spoken, items = choice.turn_id, choice.spoken, list[dict[str, Any]]()
    status = "incomplete" if choice.finish == "length" else "completed"
    if spoken.reasoning:
        thought = [{"type": "reasoning_text", "text": spoken.reasoning}]
        items.append({"id": f"rs_{turn_id}", "type": "reasoning", "summary": [], "content": thought, "status": status})
    if spoken.content or not spoken.calls:
        logprobs = token_logprobs(choice) if asked.logprobs else []
        text = {"type": "output_text", "text": spoken.content, "annotations": [], "logprobs": logprobs}
        message = {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "content": [text]}
        items.append({**message, "status": status})
    for place, call in enumerate(spoken.calls):
        named = {"id": f"fc_{turn_id}_{place}", "call_id": spoken.call_ids[place], "name": call.name}
        called = {**named, "type": "function_call", "status": "completed", **asked.called_as.get(call.name, {})}
        as_text = called["type"] == "function_call"
        items.append({**called, "arguments": arguments_text(call.arguments) if as_text else call.arguments})
    return items


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """Return the form of an item at the beginning of its stream."""
    match item["type"]:
        case "compaction" | "tool_search_call":
            return item
        case "function_call":
            return {**item, "status": "in_progress", "arguments": ""}
    return {**item, "status": "in_progress", "content": []}


def _streamed(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind, data) of each event between the beginning and the end of an item."""
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
