"""OpenAI's chat API on the wire: what a request may ask, and how answers, chunks and errors look."""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_environments.http_server import read_agents_json
from model_families.chat.messages import ChatMessage

MODEL = "policy"
"""The name under which the policy is listed; a request may name any model."""
SAMPLING_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "reasoning_effort",
    "parallel_tool_calls",
    "logprobs",
)
"""Settings that a request may name and that are not applied: the policy decides how it is sampled."""
MAX_STOPS = 16
SETTING_CHARACTERS = 200
"""Most characters of such a setting that are recorded: an agent must not fill the record, which holds them once a
sequence."""


class ApiError(Exception):
    """A refusal in OpenAI's shape. Clients try 408, 409, 429 and 5xx again, and nothing else."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": " ".join(str(self).split()), "type": kind, "param": None, "code": self.code}}


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """The body of ``/v1/chat/completions``. Fields that are not here change nothing; some of them are recorded."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    model: str = MODEL
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Raises BadBody, or ApiError (400) for what is no request, or asks for what the policy cannot do."""
        try:
            request = cls.model_validate(read_agents_json(body))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise ApiError(400, "invalid_request", f"{where}: {first['msg']}") from error
        if request.n not in (None, 1):
            raise ApiError(400, "unsupported", "n must be 1: ask again for another sample")
        if (request.response_format or {}).get("type", "text") != "text":
            raise ApiError(400, "unsupported", "response_format: the policy's tokens are not constrained; ask for text")
        if "functions" in (request.model_extra or {}):
            raise ApiError(400, "unsupported", "functions: offer them as tools")
        for number, tool in enumerate(request.tools or []):
            if not (isinstance(function := tool.get("function"), dict) and isinstance(function.get("name"), str)):
                raise ApiError(400, "invalid_request", f"tools.{number}: a tool is a function with a name")
        return request

    @property
    def stops(self) -> list[str]:
        """Texts before which the turn ends."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stops if text]

    @property
    def token_limit(self) -> int | None:
        """The bound on the turn's tokens that was asked for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def not_applied(self) -> dict[str, Any]:
        """The settings that the request named and that are not applied, as they are recorded."""
        extra = self.model_extra or {}
        settings = {name: extra[name] for name in SAMPLING_SETTINGS if extra.get(name) is not None}
        if self.tool_choice not in (None, "auto"):
            settings["tool_choice"] = self.tool_choice
        return {name: _recorded(value) for name, value in settings.items()}


@dataclass(frozen=True)
class Completion:
    """One answered call: ``spoken`` is what the harness is told, ``finish_reason`` OpenAI's.

    ``number`` counts the calls of the episode from 0. ``created`` is in seconds since 1970: a retry is told the same.
    """

    id: str
    number: int
    model: str
    spoken: ChatMessage
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _tool_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{self.number}_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for place, call in enumerate(self.spoken.calls)
        ]

    def body(self) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        message: dict[str, Any] = {"role": "assistant", "content": self.spoken.content}
        if self.spoken.reasoning:
            message["reasoning_content"] = self.spoken.reasoning
        if self.spoken.calls:
            message |= {"content": self.spoken.content or None, "tool_calls": self._tool_calls()}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def events(self, include_usage: bool) -> Iterator[bytes]:
        """The same as server-sent events."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if self.spoken.reasoning:
            deltas.append({"reasoning_content": self.spoken.reasoning})
        if self.spoken.content:
            deltas.append({"content": self.spoken.content})
        deltas += [{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(self._tool_calls())]
        head = self._head("chat.completion.chunk")
        for delta in deltas:
            yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
        if include_usage:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _recorded(value: Any) -> bool | int | float | str:
    """A plain value as it is; of anything else, of what JSON has no word for (NaN) too, the beginning of its repr."""
    match value:
        case bool():
            return value
        case int() | float() if abs(value) < 2**63:  # which NaN is not
            return value
        case str() if len(value) <= SETTING_CHARACTERS and value.isprintable():  # which a lone surrogate is not
            return value
        case _:
            return reprlib.repr(value)[:SETTING_CHARACTERS]


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
