"""A call, its answer and its refusal, independent of any dialect."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loop_plumbing.sanitize import sanitize
from model_families.chat.messages import ChatMessage, Tools

MODEL = "policy"
"""The name under which the policy is listed; a request may name any model."""
CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code of a prompt that does not fit."""
RETRY_AFTER_S = 1
MESSAGE_CHARACTERS = 1000
"""Most characters of a refusal."""
SETTING_CHARACTERS = 200
"""Most recorded characters of a setting: an agent must not fill the record, which holds them once a sequence."""


class ApiError(Exception):
    """A refusal, which each dialect writes in its own shape. Clients retry only the statuses 408, 409, 429 and
    5xx."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s

    def __str__(self) -> str:
        """Return the message as one line of limited length, since it may quote the request."""
        return sanitize(" ".join(super().__str__()[: 2 * MESSAGE_CHARACTERS].split()), MESSAGE_CHARACTERS)


def episode_over(why: str) -> ApiError:
    return ApiError(410, "episode_over", why)


@dataclass(frozen=True)
class Asked:
    """A client's call of the policy, in the same form for all dialects.

    ``instructions`` is a system message before the conversation, for this call only. ``text`` is a plain-text prompt
    that replaces all messages. ``called_as`` maps a tool's offered name to the fields that differ in the calls that
    the client gets. ``compacts`` asks for a summary that replaces the history. ``settings`` are the call's sampling
    settings by OpenAI's names. ``stream_usage`` asks for token counts at the end of a stream. ``size`` is the size of
    the request in bytes.
    """

    conversation: tuple[ChatMessage, ...] = ()
    instructions: str | None = None
    text: str | None = None
    tools: Tools = ()
    called_as: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    compacts: bool = False
    model: str = MODEL
    stream: bool = False
    stream_usage: bool = True
    token_limit: int | None = None
    stops: tuple[str, ...] = ()
    choices: int = 1
    logprobs: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All messages, in the order in which the policy reads them."""
        first = () if self.instructions is None else (ChatMessage("system", self.instructions),)
        return *first, *self.conversation

    def not_applied(self) -> dict[str, bool | int | float | str]:
        """Return the settings for the record. They are not applied: a recorded policy has its own settings."""
        return {name: _recorded(value) for name, value in self.settings.items()}


@dataclass(frozen=True)
class Recalled:
    """An earlier answer: the message ``spoken`` after ``conversation``, and the instructions and tools of the call."""

    instructions: str | None
    conversation: tuple[ChatMessage, ...]
    tools: Tools
    spoken: ChatMessage


@dataclass(frozen=True)
class Choice:
    """A turn that answers a call.

    ``turn_id`` is unique across episodes. ``spoken`` is the message for the harness, ``stopped_by`` the stop text that
    ended the turn. ``tokens`` are (text, log-prob) of the sampled tokens if the call asked for them, without the end
    of the turn.
    """

    turn_id: str
    spoken: ChatMessage
    finish: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None = None
    thinking_tokens: int = 0
    tokens: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer to a call. ``created`` is in seconds since 1970; a retry gets the same value."""

    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """The id of the answer's first turn."""
        return self.choices[0].turn_id


def _recorded(value: Any) -> bool | int | float | str:
    """Return a plain value unchanged; of others, and of NaN (which JSON lacks), the beginning of the repr."""
    match value:
        case bool():
            return value
        case int() | float() if abs(value) < 2**63:  # false for NaN
            return value
        case str() if len(value) <= SETTING_CHARACTERS and value.isprintable():  # false for a lone surrogate
            return value
        case _:
            return reprlib.repr(value)[:SETTING_CHARACTERS]
