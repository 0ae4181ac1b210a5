"""A chat endpoint as an episode's speaker: text in, text out, and no token ids."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from agent_environments.protocol import Message
from loop_recipes.evaluation.config import EndpointConfig
from rollout_server.collecting.speaker import TURN_LIMIT_S, ContextFull, EpisodeFailed, SpokenRecord, SpokenTurn
from rollout_server.collection_request import CollectionRequest
from rollout_server.schema import ConfigError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WARN_AFTER_S = 60.0
REACHED_WITHIN_S = 60.0
_CONTEXT_FULL = re.compile(r"context.?length|maximum context|too many tokens", re.IGNORECASE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """One answer of the endpoint; tokens as it counts them, 0 where it does not say."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class EndpointSpeaker:
    """A model behind an OpenAI-compatible endpoint. What it counts as tokens is all that is known of the context.

    Args:
        session: carries what authorizes requests.
        request: the collection's limits and way of sampling.
    """

    def __init__(self, session: aiohttp.ClientSession, endpoint: EndpointConfig, request: CollectionRequest) -> None:
        self._session = session
        self._endpoint = endpoint
        self._request = request
        self._messages: list[dict[str, str]] = []
        self._replies: list[Reply] = []

    @property
    def sampled_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self._replies)

    def begin(self, episode_id: str, messages: Sequence[Message]) -> None:
        self._messages = [asdict(message) for message in messages]

    async def speak(self, seed: int) -> SpokenTurn:
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                reply = await self._ask(seed)
        except TimeoutError:
            reason = f"{self._endpoint.model} gave no answer within {TURN_LIMIT_S:g} s"
            raise EpisodeFailed("server_error", reason) from None
        self._replies.append(reply)
        self._messages.append({"role": "assistant", "content": reply.text})
        return SpokenTurn(
            text=reply.text,
            policy_version=self._request.policy_version,
            finish_reason=reply.finish_reason,
            server=self._endpoint.model,
            seconds=reply.seconds,
        )

    def hear(self, observation: str) -> None:
        last, most = self._replies[-1], self._request.limits.max_context
        if last.prompt_tokens + last.completion_tokens >= most:
            raise ContextFull(f"the conversation fills max_context {most}")
        self._messages.append({"role": "user", "content": observation})

    def record(self) -> SpokenRecord:
        return SpokenRecord(
            extra={
                "endpoint": self._endpoint.url,
                "model": self._endpoint.model,
                "tokens": max((r.prompt_tokens + r.completion_tokens for r in self._replies), default=0),
                "completion_tokens": self.sampled_tokens,
            }
        )

    def close(self) -> None:
        """Nothing is held: the session is everybody's."""

    async def _ask(self, seed: int) -> Reply:
        """One completion; asked again, with growing pauses, while the service is busy or away. Warns once when that has
        lasted :data:`WARN_AFTER_S`.

        Raises:
            ContextFull: the conversation is too long for the endpoint.
            EpisodeFailed: the endpoint refuses the request, or answers with something else.
        """
        body = self._body(seed)
        url = f"{self._endpoint.url.rstrip('/')}/chat/completions"
        pause = FIRST_PAUSE_S
        began, warned = time.monotonic(), False
        while True:
            started = time.monotonic()
            try:
                async with self._session.post(url, json=body) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        return _reply(await answer.json(content_type=None), time.monotonic() - started)
                    shown = " ".join(text.split())[:200]
                    reason = f"{url} answers {answer.status}: {shown}"
                    if answer.status not in (408, 409, 429) and answer.status < 500:
                        if _CONTEXT_FULL.search(text):
                            raise ContextFull(f"the endpoint refuses the conversation: {shown}")
                        raise EpisodeFailed("server_error", reason)
                    wait = _retry_after(answer.headers.get("Retry-After"), pause)
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = f"{url} gives no answer: {error or type(error).__name__}"
                wait = pause
            waited = time.monotonic() - began
            if waited >= WARN_AFTER_S and not warned:
                warned = True
                logger.warning("no completion for %.0f s; asking for %g s: %s", waited, TURN_LIMIT_S, reason)
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _body(self, seed: int) -> dict[str, Any]:
        sampling = self._request.sampling
        body = {
            "model": self._endpoint.model,
            "messages": self._messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": self._request.limits.max_tokens_per_turn,
            "seed": seed,
        }
        if sampling.top_k != -1:
            body["top_k"] = sampling.top_k
        return {key: value for key, value in (body | self._endpoint.request).items() if value is not None}


def check_reached(endpoint: EndpointConfig) -> None:
    """One request, to which any answer will do: a wrong address would be asked in vain for :data:`TURN_LIMIT_S`.

    Raises:
        ConfigError: no answer within :data:`REACHED_WITHIN_S`.
    """

    async def ask() -> None:
        timeout = aiohttp.ClientTimeout(total=REACHED_WITHIN_S)
        async with (
            aiohttp.ClientSession(headers=endpoint.headers(), timeout=timeout) as session,
            session.get(f"{endpoint.url.rstrip('/')}/models"),
        ):
            pass

    try:
        asyncio.run(ask())
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"endpoint.url {endpoint.url} gives no answer ({reason}); start the service there, or correct the url"
        ) from error


def _reply(data: Any, seconds: float) -> Reply:
    """Parse an answer.

    Raises:
        EpisodeFailed: it is no chat completion.
    """
    try:
        choice = data["choices"][0]
        usage = data.get("usage") or {}
        return Reply(
            text=choice["message"].get("content") or "",
            finish_reason=str(choice.get("finish_reason")),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            seconds=seconds,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EpisodeFailed("server_error", f"the endpoint's answer is no chat completion: {error!r}") from error


def _retry_after(header: str | None, otherwise: float) -> float:
    """Seconds that a service asks to wait; its dates are not read."""
    try:
        return min(max(float(header or otherwise), 0.0), LONGEST_PAUSE_S)
    except ValueError:
        return otherwise
