"""OpenAI's chat API: ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, Field

from model_families.chat.messages import ChatMessage
from rollout_server.endpoint.dialects.dialect import (
    MAX_CHOICES,
    MAX_STOPS,
    NO_PREFILL,
    Dialect,
    Recall,
    RequestBody,
    arguments_text,
    event,
    token_logprobs,
)
from rollout_server.endpoint.messages import read_messages
from rollout_server.endpoint.wire import Answer, ApiError, Asked, Choice


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _ChatBody(RequestBody):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None


class ChatDialect(Dialect):
    """OpenAI's chat API."""

    def _read(self, body: bytes, recall: Recall) -> Asked:
        request = _ChatBody.parse(body)
        extra = request.model_extra or {}
        if "functions" in extra:
            raise ApiError(400, "unsupported", "functions: offer them as tools")
        if extra.get("continue_final_message") or any(message.get("prefix") for message in request.messages):
            raise ApiError(400, "unsupported", NO_PREFILL)
        tools = request.tools or []
        for number, tool in enumerate(tools):
            if not (isinstance(function := tool.get("function"), dict) and isinstance(function.get("name"), str)):
                raise ApiError(400, "invalid_request", f"tools.{number}: a tool is a function with a name")
        form = request.response_format
        return Asked(
            conversation=tuple(read_messages(request.messages, tools)),
            tools=tools,
            model=request.model,
            stream=bool(request.stream),
            stream_usage=bool(request.stream_options and request.stream_options.include_usage),
            token_limit=request.max_completion_tokens or request.max_tokens,
            stops=stop_texts(request.stop),
            choices=request.n or 1,
            logprobs=bool(request.logprobs),
            settings=request.settings(response_format=None if form in (None, {"type": "text"}) else form),
        )

    def whole(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": assistant_message(choice.spoken),
                "logprobs": _logprobs(asked, choice),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**_head("chat.completion", answer), "choices": choices, "usage": usage(answer)}

    def events(self, asked: Asked, answer: Answer) -> Iterator[bytes]:
        head = _head("chat.completion.chunk", answer)
        for index, choice in enumerate(answer.choices):
            for delta in _deltas(choice.spoken):
                body = {"index": index, "delta": delta, "finish_reason": None}
                if asked.logprobs and delta.keys() & {"content"} and "role" not in delta:
                    body["logprobs"] = _logprobs(asked, choice)
                yield event({**head, "choices": [body]})
            yield event({**head, "choices": [{"index": index, "delta": {}, "finish_reason": choice.finish}]})
        if asked.stream_usage:
            yield event({**head, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts: a turn ends before the first of these texts."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or []) if text)


def usage(answer: Answer) -> dict[str, Any]:
    """Return the counts of tokens."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def assistant_message(spoken: ChatMessage) -> dict[str, Any]:
    """Return an assistant's message for the client."""
    message: dict[str, Any] = {"role": "assistant", "content": spoken.content}
    if spoken.reasoning:
        message["reasoning_content"] = spoken.reasoning
    if spoken.calls:
        message |= {"content": spoken.content or None, "tool_calls": _calls(spoken)}
    return message


def _calls(spoken: ChatMessage) -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_text(call.arguments)},
        }
        for name, call in zip(spoken.call_ids, spoken.calls, strict=True)
    ]


def _deltas(spoken: ChatMessage) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if spoken.reasoning:
        yield {"reasoning_content": spoken.reasoning}
    if spoken.content:
        yield {"content": spoken.content}
    for place, call in enumerate(_calls(spoken)):
        yield {"tool_calls": [{"index": place, **call}]}


def _logprobs(asked: Asked, choice: Choice) -> dict[str, Any] | None:
    return {"content": token_logprobs(choice), "refusal": None} if asked.logprobs else None


def _head(kind: str, answer: Answer) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}
