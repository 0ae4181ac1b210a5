"""Google's ``generateContent``: the dialect of Gemini's clients, gemini-cli among them, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from model_families.chat.messages import ChatMessage
from rollout_server.endpoint.dialects import Route
from rollout_server.endpoint.dialects.dialect import (
    MAX_CHOICES,
    MAX_STOPS,
    NO_PREFILL,
    Dialect,
    Recall,
    RequestBody,
    event,
    function_tool,
)
from rollout_server.endpoint.messages import BadMessages, call_id, check_tools, read_call, read_heard
from rollout_server.endpoint.wire import Answer, ApiError, Asked, Choice

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    410: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
ANSWERS = ("output", "result", "content", "error")
"""Keys under which a function's response is a text alone."""
WISHES = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")


class _Camel(BaseModel):
    model_config = ConfigDict(extra="allow", alias_generator=to_camel, populate_by_name=True)


class _Settings(_Camel):
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    candidate_count: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    thinking_config: Any = None
    response_schema: Any = None
    response_json_schema: Any = None
    response_mime_type: Any = None


class _Calling(_Camel):
    mode: str | None = None


class _ToolConfig(_Camel):
    function_calling_config: _Calling | None = None


class _Content(_Camel):
    role: str | None = None
    parts: list[dict[str, Any]] = Field(default_factory=list)


class _GeminiBody(RequestBody):
    model_config = ConfigDict(extra="allow", alias_generator=to_camel, populate_by_name=True)

    contents: list[_Content]
    system_instruction: _Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _Settings = Field(default_factory=_Settings)


class Gemini(Dialect):
    """The dialect of Google's ``generateContent``. The request's path names the model."""

    alive = b"\n"  # Google's clients read no comments, but pass over blank lines
    streams = False

    def _read(self, body: bytes, recall: Recall) -> Asked:
        request = _GeminiBody.parse(body)
        settings = request.generation_config
        calling = None if request.tool_config is None else request.tool_config.function_calling_config
        tools, others = _tools(request.tools or [])
        system = request.system_instruction
        messages = list(_messages(request.contents))
        if not messages:
            raise BadMessages("contents must hold at least one part")
        if messages[-1].role == "assistant":
            raise BadMessages(NO_PREFILL)
        return Asked(
            conversation=tuple(messages),
            instructions=None if system is None else _text(system.parts, "systemInstruction"),
            tools=tools,
            stream=self.streams,
            token_limit=settings.max_output_tokens,
            stops=tuple(text for text in settings.stop_sequences or [] if text),
            choices=settings.candidate_count or 1,
            settings=request.settings(
                **{name: getattr(settings, name) for name in WISHES},
                thinking=settings.thinking_config,
                response_format=_form(settings),
                tool_choice=calling.mode if calling is not None and calling.mode != "AUTO" else None,
                tools=others,
            ),
        )

    def whole(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        thinking = sum(choice.thinking_tokens for choice in answer.choices)
        return {
            "candidates": [_candidate(index, choice) for index, choice in enumerate(answer.choices)],
            "usageMetadata": {
                "promptTokenCount": answer.prompt_tokens,
                "cachedContentTokenCount": answer.cached_tokens,
                "candidatesTokenCount": answer.completion_tokens - thinking,
                "thoughtsTokenCount": thinking,
                "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
            },
            "modelVersion": answer.model,
            "responseId": answer.id,
        }

    def events(self, asked: Asked, answer: Answer) -> Iterator[bytes]:
        yield event(self.whole(asked, answer))

    def refusal(self, error: ApiError) -> dict[str, Any]:
        status = STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
        reason = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.code}]
        return {"error": {"code": error.status, "message": str(error), "status": status, "details": reason}}

    def failure(self, error: ApiError) -> bytes:
        """Return an error as plain JSON, not as an event, because Google's clients look for plain JSON."""
        return json.dumps(self.refusal(error)).encode()

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}


class GeminiStream(Gemini):
    """The dialect of Google's ``streamGenerateContent``, the same with events."""

    streams = True


_MODEL = "/v1beta/models/{model}"
ROUTES = (
    Route(f"{_MODEL}:generateContent", f"{__name__}:Gemini", counts=f"{_MODEL}:countTokens", header="x-goog-api-key"),
    Route(f"{_MODEL}:streamGenerateContent", f"{__name__}:GeminiStream"),
)


def _messages(contents: Sequence[_Content]) -> Iterator[ChatMessage]:
    for number, content in enumerate(contents):
        where = f"contents[{number}]"
        match content.role:
            case "model":
                yield _turn(content.parts, where)
            case None | "user" | "function":
                yield from _heard(content.parts, where)
            case role:
                raise BadMessages(f"{where}.role {role!r} is not user, model or function")


def _turn(parts: Sequence[dict[str, Any]], where: str) -> ChatMessage:
    """Read a turn of the model. Its thoughts are skipped, since the sampled turn has them."""
    texts, calls, names = [], [], []
    for part in parts:
        match part:
            case {"functionCall": {"name": str(name), **call}}:
                calls.append(read_call(name, call.get("args"), where))
                names.append(call_id(call.get("id")))
            case {"thought": True}:
                pass
            case {"text": str(text)}:
                texts.append(text)
            case {"thoughtSignature": _}:
                pass
            case _:
                raise BadMessages(f"{where}: a model's parts are text, thoughts and function calls")
    return ChatMessage("assistant", "".join(texts), tuple(calls), call_ids=tuple(names))


def _heard(parts: Sequence[dict[str, Any]], where: str) -> Iterator[ChatMessage]:
    """Yield each function response as a message of its own, and the user's content between them as user messages."""
    others: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(response := part.get("functionResponse"), dict):
            if others:
                yield ChatMessage("user", _text(others, where))
                others = []
            yield ChatMessage("tool", _result(response, where))
        else:
            others.append(part)
    if others:
        yield ChatMessage("user", _text(others, where))


def _result(response: Mapping[str, Any], where: str) -> str:
    """Return a function's response as text: the text itself if the response is one text, else its JSON."""
    value, parts = response.get("response"), response.get("parts")
    match value:
        case {**fields} if (
            len(fields) == 1 and isinstance(text := next(iter(fields.values())), str) and {*fields} & {*ANSWERS}
        ):
            answer = text
        case _:
            answer = json.dumps(value, ensure_ascii=False)
    media = _text(parts, where) if isinstance(parts, list) else ""
    return "\n".join(text for text in (answer, media) if text)


def _text(parts: Iterable[Any], where: str) -> str:
    return read_heard([_part(part) for part in parts], where)


def _part(part: Any) -> Any:
    """Return a part of Google's content in the form that the other dialects use."""
    match part:
        case {"text": str(text)}:
            return {"type": "text", "text": text}
        case {"inlineData": {"mimeType": str(kind)}} | {"fileData": {"mimeType": str(kind)}}:
            types = {"image": "image", "audio": "audio", "video": "video_url"}
            return {"type": types.get(kind.partition("/")[0], "document"), "media_type": kind}
        case {**keys} if keys:
            return {"type": next(iter(keys))}
    return part


def _tools(entries: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the functions, and the names of tools that only Google has (None if there are none)."""
    tools, others = list[dict[str, Any]](), set[str]()
    for tool in entries:
        declared = tool.get("functionDeclarations", tool.get("function_declarations"))
        if not isinstance(declared, list):
            others.update(tool)
            continue
        for function in declared:
            if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
                raise BadMessages(f"tools: function {len(tools)} has no name")
            schema = function.get("parametersJsonSchema") or _json_schema(function.get("parameters"), 0)
            tools.append(function_tool(name, function.get("description"), schema))
    check_tools(tools)
    return tools, ", ".join(sorted(others)) or None


def _json_schema(schema: Any, level: int) -> Any:
    """Return a schema whose type names are in lower case, as JSON Schema requires."""
    if level > 100:
        raise BadMessages("tools must not be nested more than 100 times")
    if isinstance(schema, dict):
        return {
            key: value.lower() if key == "type" and isinstance(value, str) else _json_schema(value, level + 1)
            for key, value in schema.items()
        }
    return [_json_schema(value, level + 1) for value in schema] if isinstance(schema, list) else schema


def _form(settings: _Settings) -> Any:
    """Return the JSON schema or MIME type that the answer must follow; None for plain text."""
    schema = settings.response_json_schema or settings.response_schema
    kind = settings.response_mime_type
    return schema or (kind if kind not in (None, "text/plain") else None)


def _candidate(index: int, choice: Choice) -> dict[str, Any]:
    spoken, parts = choice.spoken, list[dict[str, Any]]()
    if spoken.reasoning:
        parts.append({"text": spoken.reasoning, "thought": True})
    if spoken.content or not spoken.calls:
        parts.append({"text": spoken.content})
    for name, call in zip(spoken.call_ids, spoken.calls, strict=True):
        parts.append({"functionCall": {"id": name, "name": call.name, "args": call.arguments}})
    finish = "MAX_TOKENS" if choice.finish == "length" else "STOP"
    return {"index": index, "content": {"role": "model", "parts": parts}, "finishReason": finish}
