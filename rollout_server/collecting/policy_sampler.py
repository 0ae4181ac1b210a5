"""One request to the node's policy: which version answers it, and what its failures mean for the episode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agent_environments.protocol import EnvironmentPool
from loop_formats.chat_tokens import ChatTokens
from loop_formats.collection_request import Limits, Sampling
from rollout_server.collecting.speaker import TURN_LIMIT_S, EpisodeFailed
from rollout_server.inference.router import (
    BadLogprob,
    Generation,
    RequestRefused,
    Router,
    ServerUnavailable,
)
from rollout_server.metrics import NodeMetrics
from rollout_server.policies.store import PolicyStore, UnknownPolicy


@dataclass(frozen=True)
class EpisodeServices:
    """The services that the episodes of a node share."""

    pool: EnvironmentPool
    tokens: ChatTokens
    router: Router
    policies: PolicyStore
    metrics: NodeMetrics


class PolicySampler:
    """Samples turns of one version, or of whichever is newest at each turn.

    Args:
        version: of the policy, where it is pinned.
        pinned_model: the name that the servers know that version by, which somebody has acquired; None for the newest.
    """

    def __init__(
        self, sampling: Sampling, limits: Limits, version: int, pinned_model: str | None, services: EpisodeServices
    ):
        self._sampling = sampling
        self._limits = limits
        self._version = version
        self._pinned_model = pinned_model
        self._services = services

    async def sample(
        self, episode_id: str, token_ids: Sequence[int], seed: int, max_tokens: int | None = None
    ) -> tuple[int, Generation]:
        """The policy version that answered, and what it sampled after ``token_ids``, fewer than ``limits.max_context``.

        Args:
            episode_id: keeps the requests of an episode on one server.
            max_tokens: a bound below that of the limits.

        Raises:
            EpisodeFailed: nothing can come of this attempt any more.
        """
        services = self._services
        most = min(self._limits.max_tokens_per_turn, self._limits.max_context - len(token_ids))
        try:
            if self._pinned_model is not None:
                version, model = self._version, self._pinned_model
            else:
                version = services.policies.latest()
                model = services.policies.acquire(version)
            try:
                generation = await services.router.generate(
                    episode_id=episode_id,
                    token_ids=token_ids,
                    model=model,
                    max_tokens=most if max_tokens is None else min(most, max_tokens),
                    temperature=self._sampling.temperature,
                    top_p=self._sampling.top_p,
                    top_k=self._sampling.top_k,
                    seed=seed,
                    stop_token_ids=services.tokens.stop_ids,
                    deadline=time.monotonic() + TURN_LIMIT_S,
                )
            finally:
                if self._pinned_model is None:
                    services.policies.release(version)
        except BadLogprob as error:
            raise EpisodeFailed("bad_logprob", str(error)) from error
        except (ServerUnavailable, RequestRefused, UnknownPolicy) as error:
            raise EpisodeFailed("server_error", str(error)) from error
        services.metrics.turn(len(generation.token_ids), len(token_ids), generation.cached_tokens, generation.seconds)
        return version, generation
