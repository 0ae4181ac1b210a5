"""The node's own policy as a policy client: token in, token out.

Sampled ids are appended as they came from the server. Only observations are encoded, so the sequence in the rollout is
the sequence that was served, token for token. If the chat format cannot go on from a turn (its template drops the
thinking of earlier turns), or the history was shortened, the conversation is encoded anew, and a new sequence begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_environments.protocol import Message
from loop_formats.branch import BranchStart
from loop_formats.collection_request import CollectionRequest
from model_families.chat.messages import ChatMessage, Tools, as_texts, opening_messages
from rollout_server.collecting.policy_client import ContextFull, PolicyTurn, SpokenRecord
from rollout_server.collecting.policy_sampler import EpisodeServices, PolicySampler


class SamplingClient:
    """The agent that samples from a policy version of the node or, in mode "latest", from the newest version.

    ``pinned_model`` is the servers' name of the collection's version, acquired when the collection was started; None
    in mode "latest". ``start`` is the point from which a branch continues, with the ids that were served. If ``start``
    is None, the opening messages are encoded.
    """

    def __init__(
        self,
        request: CollectionRequest,
        pinned_model: str | None,
        services: EpisodeServices,
        start: BranchStart | None = None,
    ):
        self._request = request
        self._sampler = PolicySampler(request.sampling, request.limits, request.policy_version, pinned_model, services)
        self._services = services
        self._start = start
        self._episode_id = ""
        self._messages: list[ChatMessage] = []
        self._tools: Tools = ()
        self._sequences: list[SpokenRecord] = []
        self._turn_start = 0
        self._kept_free = request.limits.kept_free
        if request.limits.compaction == "summary":
            from rollout_server.collecting.compaction import SUMMARY_REQUEST  # few runs need it

            self._kept_free += len(services.tokens.encode_text(SUMMARY_REQUEST))

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(sequence.mask) for sequence in self._sequences)

    def begin(self, episode_id: str, opening: Sequence[Message], after: Sequence[Message] = ()) -> None:
        self._episode_id = episode_id
        tokens, most = self._services.tokens, self._request.limits.max_context
        start = None if self._sequences else self._start
        free = self._kept_free if self._sequences else 1
        self._messages, self._tools = opening_messages(opening)
        for message in after:
            if message.role == "assistant":
                self._messages.append(ChatMessage("assistant", message.content))
            else:
                self._messages += tokens.heard(message.content, self._tools)
        if start is None and self._overfill(self._messages, most):
            raise ContextFull(f"the prompt's tokens fill max_context {most}")
        prompt = tokens.opening(self._messages, self._tools) if start is None else start.token_ids
        if len(prompt) + free > most:
            raise ContextFull(f"the prompt's {len(prompt)} tokens fill max_context {most}")
        self._sequences.append(SpokenRecord.of_context(prompt))

    async def speak(self, seed: int) -> PolicyTurn:
        sequence, tokens = self._sequences[-1], self._services.tokens
        version, generation = await self._sampler.sample(self._episode_id, sequence.token_ids, seed)
        self._turn_start = len(sequence.token_ids)
        read = tokens.read(sequence.token_ids, generation.token_ids, bool(self._tools))
        self._messages.append(ChatMessage("assistant", read.answer, reasoning=read.reasoning))
        turn = sequence.append_turn(generation, read, version)
        return PolicyTurn(read.answer, turn, read.reasoning, sequence=len(self._sequences) - 1)

    def hear(self, observation: str) -> None:
        self._take(observation, self._services.tokens.heard(observation, self._tools), self._kept_free)

    def ask(self, request: str) -> None:
        self._take(request, [ChatMessage("user", request)], 1)

    def _take(self, text: str, new: Sequence[ChatMessage], free: int) -> None:
        """Add ``text``, which the messages ``new`` hold, if at least ``free`` tokens are left after it."""
        sequence, tokens, most = self._sequences[-1], self._services.tokens, self._request.limits.max_context
        messages = [*self._messages, *new]
        full = ContextFull(f"the observation fills max_context {most}")
        if tokens.overfill([text], most):
            raise full
        served = sequence.token_ids
        prompt, sampled = served[: self._turn_start], served[self._turn_start :]
        between = tokens.extension(prompt, sampled, new, self._tools)
        if between is not None:
            if len(served) + len(between) + free > most:
                raise full
            sequence.append_context(between)
        else:
            opening = tokens.opening(messages, self._tools)
            if len(opening) + free > most:
                raise full
            self._sequences.append(SpokenRecord.of_context(opening))
        self._messages = messages

    def record(self) -> list[SpokenRecord]:
        return [sequence for sequence in self._sequences if any(sequence.mask)]

    def close(self) -> None:
        self._services.router.release(self._episode_id)

    def _overfill(self, messages: Sequence[ChatMessage], most: int) -> bool:
        return self._services.tokens.overfill((text for _, text in as_texts(messages, self._tools)), most)
