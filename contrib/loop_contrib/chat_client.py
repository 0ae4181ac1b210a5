"""The client of OpenAI-compatible chat endpoints: one way to read their answers, even odd ones, and to ask again.

A service that is busy or away (:data:`~loop_plumbing.retries.TRANSIENT`, any 5xx, no answer at all) is asked again with
growing pauses. Busy means 429 or 529, or 503 and when to come back. A service that answers 200 with something else than
a completion, which gateways do while the service behind them fails, is asked again too; but only so often, because a
wrong address does it for ever. The reason in a message is the service's own words.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp

from loop_plumbing import running_time
from loop_plumbing.http_server import one_line
from loop_plumbing.retries import TRANSIENT, asked_to_wait, pauses
from loop_plumbing.sanitize import printable
from model_families.chat.messages import THOUGHT_CLOSES, THOUGHT_OPENS, split_thought

FIRST_PAUSE_S = 1.0
WARN_AFTER_S = 60.0
ODD_TRIES = 5
"""Answers without a completion, one after the other, after which the service is given up."""
SILENT_TRIES = 2
"""Requests without an answer in their time, after which a service that is not asked for ever is given up."""
MAX_ANSWER_BYTES = 16 << 20
MAX_REASON_CHARACTERS = 200
MAX_PAGE_CHARACTERS = 20_000
"""Length of the beginning of a page in which the service's words are searched."""
_CONTEXT_FULL = re.compile(r"context.?length|maximum context|too many tokens", re.IGNORECASE)
_MARKUP = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.IGNORECASE | re.DOTALL)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

REASONING = ("reasoning_content", "reasoning")
"""Keys of a message under which services put a model's thinking."""
THOUGHT_PARTS = ("thinking", "reasoning")
"""The types of a message's parts that are thinking."""
THOUGHT_MARKS = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<thinking>", "</thinking>"))
"""Marks around the thinking that begins some models' text, in place of the usual ones."""


class NoCompletion(Exception):
    """The service gives no completion; the message names the service and quotes its answer in one line. ``status`` is
    the HTTP status of the last answer, None without one. ``busy``: the service stayed busy until the patience ended."""

    def __init__(self, message: str, status: int | None, busy: bool = False):
        super().__init__(message)
        self.status, self.busy = status, busy


class ConversationTooLong(NoCompletion):
    """The service says that the messages are longer than the model's context."""


@dataclass(frozen=True)
class Completion:
    """An answer. The service counts the tokens; 0 without a count. ``seconds`` is the duration of the last try.
    ``text`` is the answer without its thinking, ``reasoning`` the thinking; ``content`` is the text as the service
    sent it and may hold both. ``cut_in_thinking``: the text ended inside the thinking, so there is no answer.
    A tool call has ``id``, ``name`` and ``arguments``; the arguments should be JSON.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, str], ...] = ()
    content: str = ""
    cut_in_thinking: bool = False


class _RetryableError(Exception):
    """A failure worth another try. ``odd``: the answer was not a completion; ``silent``: no answer came in time."""

    def __init__(
        self,
        reason: str,
        status: int | None,
        retry_after: str | None = None,
        odd: bool = False,
        silent: bool = False,
    ):
        super().__init__(reason)
        self.status, self.retry_after, self.odd, self.silent = status, retry_after, odd, silent

    @property
    def busy(self) -> bool:
        return self.status in (429, 529) or (self.status == 503 and self.retry_after is not None)


@dataclass(frozen=True)
class Patience:
    """How long to ask a service again: up to ``tries`` times if it cannot be reached, and ``busy_s`` seconds from its
    first answer that it is busy."""

    tries: int
    busy_s: float


class AddressClient(Generic[Answer]):
    """Sends requests to one address of an endpoint.

    Args:
        session: HTTP session with the authorization and the timeout of a request.
        address: the full URL.
        read: makes the answer from decoded JSON and the seconds that the request took; None if it is not an answer.

    Attributes:
        completions: number of answers received so far.
    """

    def __init__(
        self, session: aiohttp.ClientSession, address: str, read: Callable[[Any, float], Answer | None]
    ) -> None:
        self.completions = 0
        self._session = session
        self._url = address
        self._read = read

    async def ask(self, body: Mapping[str, Any], patience: Patience | None = None) -> Answer:
        """Return the answer to a request. Ask a service that is busy or away again until ``patience`` is over; if None,
        until this call is cancelled. Log one warning after :data:`WARN_AFTER_S`.

        Raises:
            ConversationTooLong: the request is longer than the context of the service's model.
            NoCompletion: the service refuses the request, keeps sending something else, or the patience is over.
        """
        began, warned, made, silent, odd = time.monotonic(), False, 0, 0, 0
        busy_since: float | None = None
        for pause_s in pauses(FIRST_PAUSE_S):
            try:
                answer = await self._ask(body)
            except _RetryableError as again:
                now, odd = running_time.now(), odd + 1 if again.odd else 0
                if again.busy:
                    busy_since = now if busy_since is None else busy_since
                else:
                    made, silent = made + 1, silent + again.silent
                given_up = patience is not None and (made == patience.tries or silent == SILENT_TRIES)
                busy = patience is not None and busy_since is not None and now - busy_since > patience.busy_s
                if given_up or busy or odd == ODD_TRIES:
                    raise NoCompletion(str(again), again.status, busy) from again
                waited = time.monotonic() - began
                if waited >= WARN_AFTER_S and not warned:
                    warned = True
                    logger.warning("no completion for %.0f s, asking again: %s", waited, again)
                await asyncio.sleep(asked_to_wait(again.retry_after, pause_s))
            else:
                self.completions += 1
                return answer
        raise AssertionError("the pauses do not end")

    async def _ask(self, body: Mapping[str, Any]) -> Answer:
        started = time.monotonic()
        try:
            async with self._session.post(self._url, json=body) as answer:
                status, retry_after = answer.status, answer.headers.get("Retry-After")
                text = await _text(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            silent = isinstance(error, TimeoutError)
            raise _RetryableError(f"{self._url} gives no answer: {one_line(error)}", None, silent=silent) from error
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if status == 200:
            completion = self._read(data, time.monotonic() - started)
            if completion is None:
                raise _RetryableError(
                    f"{self._url} answers 200 and no completion: {_words(data, text)}", status, odd=True
                )
            return completion
        reason = f"{self._url} answers {status}: {_words(data, text)}"
        if status in TRANSIENT or status == 409 or status >= 500:  # a model's server breaks over load with any of these
            raise _RetryableError(reason, status, retry_after)
        if _CONTEXT_FULL.search(text):
            raise ConversationTooLong(reason, status)
        raise NoCompletion(reason, status)


class ChatClient(AddressClient[Completion]):
    """Sends chat requests to one endpoint. ``url`` does not include ``/chat/completions``."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        super().__init__(session, f"{url.rstrip('/')}/chat/completions", _completion)
        self.complete = self.ask


async def _text(answer: aiohttp.ClientResponse) -> str:
    """Read at most :data:`MAX_ANSWER_BYTES` of the body. Any charset that the service names is accepted."""
    body = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            break
    return body.decode(errors="replace")


def _completion(data: Any, seconds: float) -> Completion | None:
    """Return the completion that ``data`` holds; None if it holds none."""
    match data:
        case {"choices": [{"message": dict(message)} as choice, *_]}:
            content = message.get("content")  # some leave it out where it is empty
        case _:
            return None
    if not isinstance(content, str | list | None):
        return None
    usage = data.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    text, finish_reason = _joined(content), str(choice.get("finish_reason"))
    reasoning = next((_joined(each) for name in REASONING if isinstance(each := message.get(name), str)), "")
    parts = (reasoning, text, not text and finish_reason == "length") if reasoning else _apart(text)
    return Completion(
        text=parts[1],
        finish_reason=finish_reason,
        prompt_tokens=_count(counts.get("prompt_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
        seconds=seconds,
        reasoning=parts[0],
        tool_calls=tuple(_calls(message.get("tool_calls"))),
        content=text,
        cut_in_thinking=parts[2],
    )


def _apart(text: str) -> tuple[str, str, bool]:
    """Return (thinking, answer, cut) of a text that may hold thinking in one or several places. ``cut``: the text ended
    inside the thinking."""
    for opens, closes in THOUGHT_MARKS:
        if text.lstrip().startswith(opens):
            text = text.replace(opens, THOUGHT_OPENS, 1).replace(closes, THOUGHT_CLOSES, 1)
    before, _, behind = text.partition(THOUGHT_OPENS)
    speaks_first = THOUGHT_CLOSES not in before and (THOUGHT_CLOSES in behind or before.endswith("\n"))
    lead = before if speaks_first and before.strip() else ""
    thought, answer, cut = split_thought(text[len(lead) :])
    if len(answer) < len(text) and THOUGHT_OPENS in answer.partition(THOUGHT_CLOSES)[0]:
        further, answer, cut = _apart(answer)
        thought = "\n".join(filter(None, (thought, further)))
    return thought, lead + answer, cut and not lead


def _calls(calls: Any) -> Iterator[dict[str, str]]:
    """Yield the tool calls of a message; skip malformed calls. A call without an id gets one made from its position."""
    for number, call in enumerate(calls if isinstance(calls, list) else []):
        match call:
            case {"function": {"name": str(name), **function}}:
                arguments = function.get("arguments")
                text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
                yield {"id": str(call.get("id") or f"call_{number}"), "name": name, "arguments": text}


def _joined(content: str | list[Any] | None) -> str:
    """Return the text of a message, joined from its parts. Parts with thinking or without text are left out."""
    if isinstance(content, list):
        visible = [part for part in content if not (isinstance(part, dict) and part.get("type") in THOUGHT_PARTS)]
        texts = [part.get("text") if isinstance(part, dict) else part for part in visible]
        content = "".join(text for text in texts if isinstance(text, str))
    return printable(content or "")


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**63 else 0


def _words(data: Any, page: str) -> str:
    """Return the service's words about an error: the error's message, or the beginning of the page."""
    match data:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"detail": str(text)} | {"message": str(text)}:
            pass
        case _:
            text = _MARKUP.sub(" ", page[:MAX_PAGE_CHARACTERS])
    return " ".join(text.split())[:MAX_REASON_CHARACTERS] or "an empty body"
