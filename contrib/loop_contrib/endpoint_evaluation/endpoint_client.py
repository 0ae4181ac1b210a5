"""A chat endpoint as an episode's policy client: text in, text out, and no token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from agent_environments.protocol import Message
from loop_contrib.chat_client import ChatClient, Completion, ConversationTooLong, NoCompletion
from loop_formats.collection_request import CollectionRequest
from loop_formats.rollout import Turn
from loop_formats.schema import ConfigError
from loop_plumbing.http_server import one_line
from loop_plumbing.separate_task import result_of
from loop_recipes.config.loop_config import EndpointConfig
from rollout_server.collecting.policy_client import TURN_LIMIT_S, ContextFull, EpisodeFailed, PolicyTurn, SpokenRecord

REACHED_WITHIN_S = 60.0


class EndpointClient:
    """A model behind an OpenAI-compatible endpoint. Only its token counts tell how full the context is.

    Args:
        client: client of the endpoint.
        request: request with the collection's limits and sampling settings.

    Attributes:
        refusal: why the endpoint gave no completion; set if this ended the episode.
    """

    def __init__(self, client: ChatClient, endpoint: EndpointConfig, request: CollectionRequest) -> None:
        self.refusal: NoCompletion | None = None
        self._client = client
        self._endpoint = endpoint
        self._request = request
        self._messages: list[dict[str, str]] = []
        self._sequences: list[list[Completion]] = []

    @property
    def sampled_tokens(self) -> int:
        return sum(reply.completion_tokens for replies in self._sequences for reply in replies)

    def begin(self, episode_id: str, opening: Sequence[Message], after: Sequence[Message] = ()) -> None:
        self._messages = [asdict(message) for message in (*opening, *after)]
        self._sequences.append([])

    async def speak(self, seed: int) -> PolicyTurn:
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                reply = await self._client.complete(self._body(seed))
        except TimeoutError:
            reason = f"{self._endpoint.model} gave no answer within {TURN_LIMIT_S:g} s"
            raise EpisodeFailed("server_error", reason) from None
        except ConversationTooLong as error:
            raise ContextFull(f"the endpoint refuses the conversation: {error}") from error
        except NoCompletion as error:
            self.refusal = error
            raise EpisodeFailed("server_error", str(error)) from error
        self._sequences[-1].append(reply)
        self._messages.append({"role": "assistant", "content": reply.content})
        turn = Turn(
            start=0,
            end=0,
            policy_version=self._request.policy_version,
            finish_reason=reply.finish_reason,
            server=self._endpoint.model,
            sampling_seconds=reply.seconds,
            environment_seconds=0.0,
            message=0,
            cut_in_thinking=reply.cut_in_thinking,
        )
        return PolicyTurn(reply.text, turn, reply.reasoning, sequence=len(self._sequences) - 1)

    def hear(self, observation: str) -> None:
        last, limits = self._sequences[-1][-1], self._request.limits
        if last.prompt_tokens + last.completion_tokens + limits.kept_free > limits.max_context:
            raise ContextFull(f"the conversation fills max_context {limits.max_context}")
        self.ask(observation)

    def ask(self, request: str) -> None:
        self._messages.append({"role": "user", "content": request})

    def record(self) -> list[SpokenRecord]:
        return [SpokenRecord(extra=self._extra(replies)) for replies in self._sequences if replies]

    def _extra(self, replies: Sequence[Completion]) -> dict[str, Any]:
        return {
            "endpoint": self._endpoint.url,
            "model": self._endpoint.model,
            "tokens": max(reply.prompt_tokens + reply.completion_tokens for reply in replies),
            "completion_tokens": sum(reply.completion_tokens for reply in replies),
        }

    def close(self) -> None:
        """Do nothing, because all clients share the session."""

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
    """Check that the address answers at all. Else a turn would wait for a wrong address for :data:`TURN_LIMIT_S`.

    Raises:
        ConfigError: there is no answer within :data:`REACHED_WITHIN_S`.
    """

    async def ask() -> None:
        timeout = aiohttp.ClientTimeout(total=REACHED_WITHIN_S)
        async with (
            aiohttp.ClientSession(headers=endpoint.headers(), timeout=timeout) as session,
            session.get(f"{endpoint.url.rstrip('/')}/models"),
        ):
            pass

    try:
        result_of(ask())
    except (aiohttp.ClientError, TimeoutError) as error:
        cure = "start the service there, or correct the url"
        raise ConfigError(f"endpoint.url {endpoint.url} gives no answer ({one_line(error)}); {cure}") from error
