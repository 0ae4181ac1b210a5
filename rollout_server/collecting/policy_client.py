"""The agent as an episode sees it: it hears the environment's observations and speaks one turn at a time.

There are two: :class:`~rollout_server.collecting.sampling_client.SamplingClient` samples token ids on the node's own
vLLM servers, and the evaluation's ``EndpointClient`` asks a chat endpoint for text. A policy client keeps the
conversation to itself: token ids never pass through the episode, which gets them for its record at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agent_environments.protocol import Message
from loop_formats.rollout import BRANCH_DIFFERS, Turn

if TYPE_CHECKING:
    from model_families.chat.format import ReadTurn
    from rollout_server.inference.router import Generation


class EpisodeFailed(Exception):
    """The attempt has no usable result; ``reason`` is one of :data:`loop_formats.rollout.FAILURE_REASONS`."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class BranchRefused(EpisodeFailed):
    """The world's answers differ from the answers in the rollout from which a branch continues."""

    def __init__(self, message: str):
        super().__init__(BRANCH_DIFFERS, message)


TURN_LIMIT_S = 3600.0
"""Last resort for one turn, retries included. The node replaces a server that hangs much sooner, and waits for a busy
one."""


class ContextFull(Exception):
    """The conversation leaves no room for another turn. A shortened conversation may (``limits.compaction``)."""


@dataclass(frozen=True)
class PolicyTurn:
    """A turn of the policy.

    ``text`` is the action, ``reasoning`` the thinking before the action, and ``sequence`` the number of the policy
    client's sequence that holds the turn. ``turn`` is the record of the turn, without the environment's part; the
    record's span is empty if the policy client has no token ids.
    """

    text: str
    turn: Turn
    reasoning: str = ""
    sequence: int = 0


@dataclass(frozen=True)
class SpokenRecord:
    """The part of a sequence that a policy client records, in the fields of :class:`~loop_formats.rollout.Rollout`.

    Shapes: ``token_ids``, ``mask`` and ``sampler_logprobs`` are [s]; s is 0 if the policy client has only text.
    """

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_context(cls, token_ids: Sequence[int]) -> SpokenRecord:
        """Return a new record that begins with ids that nobody sampled."""
        record = cls()
        record.append_context(token_ids)
        return record

    def append_context(self, token_ids: Sequence[int]) -> None:
        """Append ids that nobody sampled."""
        self.token_ids.extend(token_ids)
        self.mask.extend([False] * len(token_ids))
        self.sampler_logprobs.extend([0.0] * len(token_ids))

    def append_turn(self, generation: Generation, read: ReadTurn, version: int, message: int = 0) -> Turn:
        """Append the ids that a policy version sampled, and return the record of the turn."""
        start = len(self.token_ids)
        self.token_ids.extend(generation.token_ids)
        self.mask.extend([True] * len(generation.token_ids))
        self.sampler_logprobs.extend(generation.logprobs)
        return Turn(
            start=start,
            end=len(self.token_ids),
            policy_version=version,
            finish_reason=generation.finish_reason,
            server=generation.server,
            sampling_seconds=generation.seconds,
            environment_seconds=0.0,
            message=message,
            cached_tokens=generation.cached_tokens,
            thinking_tokens=read.thinking_tokens,
            cut_in_thinking=read.cut_in_thinking,
        )


class PolicyClient(Protocol):
    """The agent of one episode. Calls come one at a time: begin, then speak and hear in turn, and begin again after the
    history was shortened. The last call is always close."""

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens of the turns spoken so far, which an abort discards."""

    def begin(self, episode_id: str, opening: Sequence[Message], after: Sequence[Message] = ()) -> None:
        """Take the first messages of the episode, or of a new sequence in the episode.

        Args:
            after: turns and observations that a branch replays, or that remain of a longer history.

        Raises:
            ContextFull: the messages leave no room for a turn.
        """

    async def speak(self, seed: int) -> PolicyTurn:
        """Return the next turn. The policy's server may take up to :data:`TURN_LIMIT_S`.

        Raises:
            ContextFull: the policy's server found the conversation too long.
            EpisodeFailed: the attempt cannot go on.
        """

    def hear(self, observation: str) -> None:
        """Take the environment's answer to the last turn.

        Raises:
            ContextFull: the answer leaves less than ``limits.kept_free`` tokens. The answer counts as not heard then.
        """

    def ask(self, request: str) -> None:
        """Take a request from the node itself in place of the environment's answer.

        Raises:
            ContextFull: the request leaves no room for another turn.
        """

    def record(self) -> list[SpokenRecord]:
        """Return the record of each sequence in which a turn was sampled. Mostly there is one sequence."""

    def close(self) -> None:
        """Release the episode's resources once it is over, however it ended."""
