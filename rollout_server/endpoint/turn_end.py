"""The end of a turn, and the finish reason for the client.

A turn that a stop text ends keeps the ids up to the one that completes that text; no client gets those after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from model_families.chat.format import ChatFormat
from model_families.chat.messages import ChatMessage
from rollout_server.inference.router import Generation

CUT = "cut"
"""The finish reason of a turn that a stop text ended."""


def cut_at_stop(tokens: ChatFormat, generation: Generation, stops: Sequence[str]) -> tuple[Generation, str | None]:
    """Return the generation up to the token that completes the first stop text, and this text. Without a stop text,
    return the whole generation and None."""
    token_ids = tokens.without_stop(generation.token_ids)
    text = tokens.decode(token_ids) if stops else ""
    if not any(stop in text for stop in stops):
        return generation, None

    def holds_stop(count: int) -> bool:
        beginning = tokens.decode(token_ids[:count])
        return any(stop in beginning for stop in stops)

    length = bisect_left(range(len(token_ids)), True, lo=1, key=holds_stop)
    cut = replace(generation, token_ids=token_ids[:length], logprobs=generation.logprobs[:length], finish_reason=CUT)
    rest = text[len(before_stop(text, stops)) :]
    return cut, max((stop for stop in stops if rest.startswith(stop)), key=len)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first stop text in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]


def finish_reason(spoken: ChatMessage, generation: Generation) -> Literal["stop", "length", "tool_calls"]:
    """Return OpenAI's name of the finish reason."""
    if spoken.calls:
        return "tool_calls"
    return "length" if generation.finish_reason == "length" else "stop"
