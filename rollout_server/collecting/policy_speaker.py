"""The node's own policy as a speaker: token in, token out.

Sampled ids are appended as they came from the server. Only observations are encoded, so the sequence in the rollout is
the sequence that was served, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_environments.protocol import Message
from loop_formats.collection_request import CollectionRequest
from rollout_server.collecting.policy_sampler import EpisodeServices, PolicySampler
from rollout_server.collecting.speaker import ContextFull, SpokenRecord, SpokenTurn


class PolicySpeaker:
    """A policy version that the node serves, or, in mode "latest", whichever is newest at each turn.

    ``pinned_model`` is the name that the servers know the collection's version by, which whoever started the collection
    has acquired; None in mode "latest". ``prefix`` are the ids that a branch goes on from, as they were served; with
    None, the opening messages are encoded.
    """

    def __init__(
        self,
        request: CollectionRequest,
        pinned_model: str | None,
        services: EpisodeServices,
        prefix: list[int] | None = None,
    ):
        self._request = request
        self._sampler = PolicySampler(request.sampling, request.limits, request.policy_version, pinned_model, services)
        self._services = services
        self._prefix = prefix
        self._episode_id = ""
        self._token_ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._closed_by_policy = True

    @property
    def sampled_tokens(self) -> int:
        return sum(self._mask)

    def begin(self, episode_id: str, messages: Sequence[Message]) -> None:
        self._episode_id = episode_id
        tokens, most = self._services.tokens, self._request.limits.max_context
        if self._prefix is None and tokens.overfill((message.content for message in messages), most):
            raise ContextFull(f"the prompt's tokens fill max_context {most}")
        prompt = self._prefix if self._prefix is not None else tokens.prompt(messages)
        if len(prompt) >= most:
            raise ContextFull(f"the prompt's {len(prompt)} tokens fill max_context {most}")
        self._append(prompt)

    async def speak(self, seed: int) -> SpokenTurn:
        version, generation = await self._sampler.sample(self._episode_id, self._token_ids, seed)
        services, start = self._services, len(self._token_ids)
        self._token_ids += generation.token_ids
        self._mask += [True] * len(generation.token_ids)
        self._logprobs += generation.logprobs
        last = generation.token_ids[-1]
        spoken = generation.token_ids[:-1] if last in services.tokens.stop_ids else generation.token_ids
        self._closed_by_policy = last == services.tokens.im_end
        return SpokenTurn(
            text=services.tokens.decode(spoken),
            policy_version=version,
            finish_reason=generation.finish_reason,
            server=generation.server,
            seconds=generation.seconds,
            start=start,
            end=len(self._token_ids),
            cached_tokens=generation.cached_tokens,
        )

    def hear(self, observation: str) -> None:
        tokens, most = self._services.tokens, self._request.limits.max_context
        full = tokens.overfill([observation], most - len(self._token_ids))
        continuation = [] if full else tokens.continuation(observation, self._closed_by_policy)
        if full or len(self._token_ids) + len(continuation) >= most:
            raise ContextFull(f"the observation fills max_context {most}")
        self._append(continuation)

    def record(self) -> SpokenRecord:
        return SpokenRecord(self._token_ids, self._mask, self._logprobs)

    def close(self) -> None:
        self._services.router.release(self._episode_id)

    def _append(self, token_ids: list[int]) -> None:
        """Ids that nobody sampled."""
        self._token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
