"""A request to the node's policy: the choice of the version, and the meaning of failures for the episode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_environments.protocol import EnvironmentPool
from loop_formats.collection_request import Limits, Sampling
from loop_formats.rollout import REQUEST_REFUSED
from model_families.chat.format import ChatFormat
from rollout_server.collecting.attempt import derive_seed
from rollout_server.collecting.policy_client import TURN_LIMIT_S, EpisodeFailed
from rollout_server.inference.router import BadLogprob, Generation, RequestRefused, Router, ServerUnavailable
from rollout_server.metrics import NodeMetrics
from rollout_server.policies.store import PolicyStore, UnknownPolicy

CHARACTER_TOKENS = 8
"""More tokens than one character can have."""


@dataclass(frozen=True)
class EpisodeServices:
    """The services that the episodes of a node share."""

    pool: EnvironmentPool
    tokens: ChatFormat
    router: Router
    policies: PolicyStore
    metrics: NodeMetrics


class PolicySampler:
    """Samples turns from one policy version, or always from the newest version.

    Args:
        version: the policy's version, if it is pinned.
        pinned_model: name of ``version`` on the servers, which the caller has acquired; None means the newest version.
    """

    def __init__(
        self, sampling: Sampling, limits: Limits, version: int, pinned_model: str | None, services: EpisodeServices
    ):
        self.sampling = sampling
        self._limits = limits
        self._version = version
        self._pinned_model = pinned_model
        self._services = services

    async def sample(
        self,
        episode_id: str,
        token_ids: Sequence[int],
        seed: int,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stops: Sequence[str] = (),
    ) -> tuple[int, Generation]:
        """Sample after ``token_ids`` (fewer than ``limits.max_context``). Return the policy version and its tokens.

        Args:
            episode_id: sends all requests of an episode to one server.
            max_tokens: the most tokens to sample, if fewer than the limits allow.
            sampling: settings that replace the sampler's own settings.
            stops: texts that end the turn; the last token is the one that completes such a text.

        Raises:
            EpisodeFailed: the attempt cannot go on.
        """
        services = self._services
        room = self._limits.max_context - len(token_ids)
        if max_tokens is not None:
            room = min(room, max_tokens)
        try:
            if self._pinned_model is not None:
                version, model = self._version, self._pinned_model
            else:
                version = services.policies.latest()
                model = services.policies.acquire(version)
            try:
                settings = sampling or self.sampling
                generation = await self._turn(episode_id, token_ids, model, room, seed, settings, stops)
            finally:
                if self._pinned_model is None:
                    services.policies.release(version)
        except BadLogprob as error:
            raise EpisodeFailed("bad_logprob", str(error)) from error
        except RequestRefused as error:
            raise EpisodeFailed(REQUEST_REFUSED, str(error)) from error
        except (ServerUnavailable, UnknownPolicy) as error:
            raise EpisodeFailed("server_error", str(error)) from error
        services.metrics.turn(len(generation.token_ids), len(token_ids), generation.cached_tokens, generation.seconds)
        return version, generation

    async def _turn(
        self,
        episode_id: str,
        token_ids: Sequence[int],
        model: str,
        room: int,
        seed: int,
        sampling: Sampling,
        stops: Sequence[str],
    ) -> Generation:
        """Sample thinking and answer in one request, or in two requests if each part has its own limit."""
        tokens, limits = self._services.tokens, self._limits
        # vLLM would find a stop text in the prompt where its last character goes on in the sampled tokens.
        if stops and tokens.decode(token_ids[-CHARACTER_TOKENS:]).endswith("\ufffd"):
            stops = ()

        async def request(token_ids: Sequence[int], most: int, seed: int, stop_ids: Sequence[int]) -> Generation:
            return await self._services.router.generate(
                episode_id=episode_id,
                token_ids=token_ids,
                model=model,
                max_tokens=most,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seed,
                stop_token_ids=stop_ids,
                stops=stops,
                deadline=time.monotonic() + TURN_LIMIT_S,
            )

        if limits.max_thinking_tokens is None or not tokens.thinking_ends:
            most = min(limits.max_tokens_per_turn, room)
            return await request(token_ids, most, seed, tokens.stop_ids)
        ends = (*tokens.stop_ids, *tokens.thinking_ends)
        thought = await request(token_ids, min(limits.max_thinking_tokens, room), seed, ends)
        turn = tokens.read(token_ids, thought.token_ids, with_tools=False)
        most = turn.thinking_tokens + limits.max_tokens_per_turn
        if len(thought.token_ids) > most:  # it began its answer without thinking
            ids, logprobs = thought.token_ids[:most], thought.logprobs[:most]
            return replace(thought, token_ids=ids, logprobs=logprobs, finish_reason="length")
        remaining = min(most, room) - len(thought.token_ids)
        stopped = thought.finish_reason == "stop" and thought.token_ids[-1] not in tokens.thinking_ends
        if stopped or turn.cut_in_thinking or remaining <= 0:
            return thought
        served = [*token_ids, *thought.token_ids]
        rest = await request(served, remaining, derive_seed(seed, "answer"), tokens.stop_ids)
        return replace(
            rest,
            token_ids=thought.token_ids + rest.token_ids,
            logprobs=thought.logprobs + rest.logprobs,
            cached_tokens=thought.cached_tokens,
            seconds=thought.seconds + rest.seconds,
        )
