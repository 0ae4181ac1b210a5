"""Anthropic's messages: ``/v1/messages``, and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from model_families.chat.messages import ChatMessage
from rollout_server.endpoint.dialects.dialect import (
    MAX_STOPS,
    NO_PREFILL,
    TURN_ID,
    Dialect,
    Recall,
    RequestBody,
    arguments_text,
    event,
    offered_tools,
)
from rollout_server.endpoint.messages import BadMessages, call_id, read_call, read_heard, read_text
from rollout_server.endpoint.wire import CONTEXT_EXCEEDED, Answer, ApiError, Asked, Choice, Recalled

ACCOUNTING_PREFIX = "x-anthropic-billing-header"
"""Beginning of a system block of Claude Code that is meant for its maker's accounts, and differs in every call."""
MAKERS_SEARCH_PREFIX = "tool_search_tool_"
"""Beginning of the type of a tool by which the API's maker would search the tools that are to be loaded later."""
Loadable = Mapping[str, Mapping[str, Any]]
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_MESSAGE = re.compile(rf"msg_({TURN_ID})")


class _Thread(BaseModel):
    """A thread of messages. A request with "continue" has only new messages; all else stays as in the last request."""

    type: Literal["create", "continue"]
    previous_message_id: str = ""


class _MessagesBody(RequestBody):
    messages: list[dict[str, Any]]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    thread: _Thread | None = None
    compaction: dict[str, Any] | None = None


class Anthropic(Dialect):
    """Anthropic's messages API."""

    alive = event({"type": "ping"}, "ping")

    def _read(self, body: bytes, recall: Recall) -> Asked:
        request = _MessagesBody.parse(body)
        if request.compaction is not None:
            raise ApiError(400, "unsupported", "compaction: ask for a summary in a message")
        before = _before(request.thread, recall)
        kinds = [str(tool.get("type")) for tool in request.tools or []]
        agent_searches = not any(kind.startswith(MAKERS_SEARCH_PREFIX) for kind in kinds)
        tools = offered_tools(request.tools or [], "custom", "custom", "input_schema", agent_searches)
        messages = [*_read_messages(request.messages, tools.loadable)]
        if messages and messages[-1].role == "assistant":
            raise ApiError(400, "unsupported", NO_PREFILL)
        form = request.output_format or (request.output_config or {}).get("format")
        return Asked(
            conversation=(*(() if before is None else (*before.conversation, before.spoken)), *messages),
            instructions=_system_text(request.system, before),
            tools=before.tools if before is not None and request.tools is None else tools.offered,
            model=request.model,
            stream=bool(request.stream),
            token_limit=request.max_tokens,
            stops=tuple(text for text in request.stop_sequences or [] if text),
            settings=request.settings(response_format=form, tools=tools.others),
        )

    def whole(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        [choice] = answer.choices
        stopped = choice.finish == "stop" and choice.stopped_by is not None
        return {
            **_head(answer),
            "content": _blocks(choice),
            "stop_reason": "stop_sequence" if stopped else STOP_REASONS[choice.finish],
            "stop_sequence": choice.stopped_by if stopped else None,
            "usage": _usage(answer, answer.completion_tokens),
        }

    def events(self, asked: Asked, answer: Answer) -> Iterator[bytes]:
        whole = self.whole(asked, answer)
        start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
        yield _event("message_start", message=start)
        for index, block in enumerate(whole["content"]):
            empty, deltas = _streamed(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ended, usage=whole["usage"])
        yield _event("message_stop")

    def refusal(self, error: ApiError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = str(error)
        if error.code == CONTEXT_EXCEEDED:  # clients compact their history when they read these words
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message, "details": {"error_code": error.code}}}

    def failure(self, error: ApiError) -> bytes:
        return event(self.refusal(error), "error")


def _before(thread: _Thread | None, recall: Recall) -> Recalled | None:
    """Return the message from which a thread continues; None if there is no thread or the thread begins."""
    if thread is None or thread.type == "create":
        return None
    match = _MESSAGE.fullmatch(thread.previous_message_id)
    recalled = recall(match[1]) if match else None
    if recalled is None:  # by this code clients send their whole history
        raise ApiError(404, "thread_not_found", f"no message {thread.previous_message_id[:40]!r} in this episode")
    return recalled


def _read_messages(messages: Sequence[dict[str, Any]], loadable: Loadable) -> Iterator[ChatMessage]:
    if not messages:
        raise BadMessages("messages must hold at least one message")
    for number, message in enumerate(messages):
        where, content = f"messages[{number}]", message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        match message.get("role"):
            case "assistant":
                yield _turn(blocks, where)
            case "user" | "system" as role:
                yield from _heard(role, blocks, where, loadable)
            case role:
                raise BadMessages(f"{where}.role {role!r} is not one of user, assistant, system")


def _turn(blocks: Sequence[Any], where: str) -> ChatMessage:
    """Read an assistant's message. The sampled turn, not the message, supplies the thinking."""
    texts, calls, names = [], [], []
    for block in blocks:
        match block:
            case {"type": "tool_use", "name": str(name)}:
                calls.append(read_call(name, block.get("input"), where))
                names.append(call_id(block.get("id")))
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                texts.append(read_text([block], where))
    return ChatMessage("assistant", "\n".join(texts), tuple(calls), call_ids=tuple(names))


def _heard(role: Any, blocks: Sequence[Any], where: str, loadable: Loadable) -> Iterator[ChatMessage]:
    """Yield each tool result as a message of its own, and the texts between the results as messages."""
    texts: list[str] = []
    for block in blocks:
        match block:
            case {"type": "tool_result", **result}:
                if texts:
                    yield ChatMessage(role, "\n".join(texts))
                    texts = []
                of = call_id(result.get("tool_use_id"))
                yield ChatMessage("tool", read_heard(result.get("content"), where, loadable), call_ids=(of,))
            case _:
                texts.append(read_heard([block], where, loadable))
    if texts or not blocks:
        yield ChatMessage(role, "\n".join(texts))


def _system_text(system: str | list[Any] | None, before: Recalled | None) -> str | None:
    if system is None:
        return None if before is None else before.instructions
    texts = [system] if isinstance(system, str) else [read_text([block], "system") for block in system]
    return "\n".join(text for text in texts if not text.startswith(ACCOUNTING_PREFIX))


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    spoken, blocks = choice.spoken, list[dict[str, Any]]()
    if spoken.reasoning:
        blocks.append({"type": "thinking", "thinking": spoken.reasoning, "signature": ""})
    if spoken.content or not spoken.calls:
        blocks.append({"type": "text", "text": spoken.content})
    for name, call in zip(spoken.call_ids, spoken.calls, strict=True):
        blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": call.arguments})
    return blocks


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first form of a content block, and the deltas that a stream adds to the block."""
    match block["type"]:
        case "tool_use":
            text = arguments_text(block["input"])
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
        case "thinking":
            return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}] if block["text"] else []


def _usage(answer: Answer, sampled: int) -> dict[str, Any]:
    """Return the token counts. The count of prompt tokens does not include cached tokens."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": sampled,
    }


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)
