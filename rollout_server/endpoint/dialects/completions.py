"""OpenAI's text completions: ``/v1/completions``. The prompt is plain text, in which nothing is a control token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field

from rollout_server.endpoint.dialects.chat import stop_texts, usage
from rollout_server.endpoint.dialects.dialect import MAX_CHOICES, MAX_STOPS, Dialect, Recall, RequestBody, event
from rollout_server.endpoint.wire import Answer, ApiError, Asked, Choice


class _CompletionsBody(RequestBody):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    stream_options: dict[str, Any] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class Completions(Dialect):
    """OpenAI's text completions API."""

    def _read(self, body: bytes, recall: Recall) -> Asked:
        request = _CompletionsBody.parse(body)
        if request.echo or request.suffix or (request.best_of or 1) > (request.n or 1):
            raise ApiError(400, "unsupported", "echo, suffix and best_of: leave them out")
        return Asked(
            text=request.prompt if isinstance(request.prompt, str) else request.prompt[0],
            model=request.model,
            stream=bool(request.stream),
            stream_usage=bool((request.stream_options or {}).get("include_usage")),
            token_limit=request.max_tokens,
            stops=stop_texts(request.stop),
            choices=request.n or 1,
            logprobs=request.logprobs is not None,
            settings=request.settings(),
        )

    def whole(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        choices = [_choice(index, asked, choice) for index, choice in enumerate(answer.choices)]
        return {**_head(answer), "choices": choices, "usage": usage(answer)}

    def events(self, asked: Asked, answer: Answer) -> Iterator[bytes]:
        for index, choice in enumerate(answer.choices):
            yield event({**_head(answer), "choices": [_choice(index, asked, choice)]})
        if asked.stream_usage:
            yield event({**_head(answer), "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"


def _choice(index: int, asked: Asked, choice: Choice) -> dict[str, Any]:
    logprobs = None
    if asked.logprobs:
        texts = [text for text, _ in choice.tokens]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in choice.tokens],
            "top_logprobs": None,
            "text_offset": [0, *accumulate(map(len, texts[:-1]))] if texts else [],
        }
    return {"index": index, "text": choice.spoken.content, "logprobs": logprobs, "finish_reason": choice.finish}


def _head(answer: Answer) -> dict[str, Any]:
    head = {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": answer.created}
    return {**head, "model": answer.model}
