"""The Rollout record: an episode writes it once, and nobody edits it afterwards.

One rollout is one line of JSON in a collection's log (``<root>/collections/<id>.jsonl``), so the training data of any
method is ``pandas.read_json(path, lines=True, dtype=False)``. Without ``dtype`` pandas takes the task ids 10_1 and 1_01
for one number. Readers that infer types from the first lines alone, ``datasets.load_dataset`` and polars, fail on
fields that are null there: give them all lines (``Dataset.from_pandas``, ``infer_schema_length=None``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from agent_environments.agent_turns import AgentTurn, agent_turns
from loop_plumbing.breakage import raised_as
from loop_plumbing.grouping import grouped

SCHEMA_VERSION = 2

MOST_IDS = 1 << 31
"""The bound of token ids: no model has more."""
POISONED_LOGPROB = -9998.0
"""vLLM replaces a log-prob that is not a number by -9999: somewhere in the KV cache or the weights there is a NaN."""

END_REASONS = ("completed", "turn_limit", "context_limit", "deadline")
"""The ends of a rollout that counts. Only ``completed`` means that the agent itself ended the episode."""

BRANCH_DIFFERS = "branch_differs"
"""The reason of a refused branch: the world answered otherwise than the stored rollout says."""

REQUEST_REFUSED = "request_refused"
"""The reason of an attempt without another try: the request itself is wrong, or too long, as the next one would be."""

FAILURE_REASONS = (
    "environment_error",
    "environment_crashed",
    "environment_timeout",
    "server_error",
    REQUEST_REFUSED,
    "bad_logprob",
    BRANCH_DIFFERS,
)
"""The reasons of attempts that were thrown away and, unless refused, replaced; they are recorded as :class:`Failure`,
never as rollouts."""


@dataclass(frozen=True)
class Turn:
    """An agent's turn: tokens ``[start, end)`` were sampled, by ``policy_version`` on ``server``, in one request.

    ``finish_reason`` is vLLM's: "stop" (the stop token is the last of the span) or "length"; or it is "cut", where an
    agent program asked for a stop text and the span ends with the token that completed it. In a rollout of text alone
    the span is (0, 0), ``server`` the endpoint's model and ``finish_reason`` the endpoint's own word.
    ``message`` is its place in the rollout's messages. ``thinking_tokens`` of the span are the model's thinking, marks
    included; ``cut_in_thinking``: the turn ended before its thinking did, and so has no answer. ``reward`` is the
    environment's reward for the turn by itself, beside the rollout's, or None. ``summary``: it is not an action, but
    sums up the history for the next sequence (``limits.compaction``).
    """

    start: int
    end: int
    policy_version: int
    finish_reason: str
    server: str
    sampling_seconds: float
    environment_seconds: float
    message: int
    failed: bool = False
    cached_tokens: int = 0
    thinking_tokens: int = 0
    cut_in_thinking: bool = False
    reward: float | None = None
    summary: bool = False


@dataclass(frozen=True)
class BranchOf:
    """The origin of a rollout that continues another: rollout ``rollout_id``, after ``turns`` turns of the episode."""

    rollout_id: str
    turns: int


@dataclass(frozen=True)
class Rollout:
    """A sequence of a finished episode; most episodes have only one.

    An agent that starts sub-agents, or whose history is rewritten, leaves an episode of several sequences. Each is a
    separate record with the episode's return. They share ``episode_id``, the ``rollout_id`` of the first; ``segment``
    counts them from 0 to ``segments`` - 1, and in the log they follow each other. If sequences share a beginning, the
    tokens sampled there are a turn of the first sequence, and context in the others. So over all sequences, each
    sampled token is in ``mask`` once.

    Shapes: ``token_ids``, ``mask`` and ``sampler_logprobs`` are [s]; ``turns`` is [t].

    Invariants, checked by :meth:`validate`: ``mask[i]`` is true exactly where a turn's span covers ``i``; spans are
    disjoint, ascending and not empty; log-probs are finite, at most 0 and above vLLM's -9999 of a poisoned KV cache
    where the mask is true, and 0.0 elsewhere; the first token was not sampled. A rollout of text alone (``text_only``)
    comes from an endpoint without token ids. It has none, and the spans of its turns are empty: it can be scored and
    read, but not trained on.

    A rollout with ``branch_of`` began inside another one. ``token_ids`` and ``messages`` hold the whole episode.
    ``turns`` and the mask cover only the tokens sampled here; the earlier ones are trained with the rollout that
    sampled them.

    A message is ``{"role", "content"}``; an assistant's may also have the thinking before its answer, as ``reasoning``,
    which no environment gets.

    ``ungradable``, ``broke`` (``{"where", "what"}``) and ``tools`` (of each ``{"tool", "calls", "raised", "what"}``)
    come from the grade (:class:`agent_environments.protocol.Grade`); usually they are None or empty.
    """

    rollout_id: str
    collection_id: str
    task_id: str
    index: int
    attempt: int
    seed: int
    dataset: str
    token_ids: list[int]
    mask: list[bool]
    sampler_logprobs: list[float]
    turns: list[Turn]
    messages: list[dict[str, str]]
    reward: float
    success: bool
    requirements: list[dict[str, Any]]
    end_reason: str
    temperature: float
    started_at: float
    seconds: float
    ungradable: str | None = None
    branch_of: BranchOf | None = None
    schema: int = SCHEMA_VERSION
    extra: dict[str, Any] = field(default_factory=dict)
    episode_id: str = ""
    segment: int = 0
    segments: int = 1
    broke: dict[str, str] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.episode_id:
            object.__setattr__(self, "episode_id", self.rollout_id)

    @classmethod
    def written(
        cls,
        rollout_id: str,
        *,
        collection_id: str,
        task_id: str,
        dataset: str,
        server: str,
        token_ids: list[int],
        spans: Sequence[tuple[int, int, int]],
        messages: list[dict[str, str]],
        reward: float,
        success: bool,
        logprobs: Sequence[float] | None = None,
        **more: Any,
    ) -> Rollout:
        """Return the record of an episode for a written conversation: the turns to learn from count as sampled.

        Args:
            server: the name of the server for all turns.
            spans: (message, start, end) of each turn to learn from.
            logprobs: [s]; the record keeps those within the turns; None for 0 everywhere.
            more: further fields.
        """
        mask, sampled_logprobs = [False] * len(token_ids), [0.0] * len(token_ids)
        for _, start, end in spans:
            mask[start:end] = [True] * (end - start)
            if logprobs is not None:
                sampled_logprobs[start:end] = logprobs[start:end]
        fields: dict[str, Any] = {"index": 0, **more}
        return cls(
            rollout_id=rollout_id,
            collection_id=collection_id,
            task_id=task_id,
            attempt=0,
            seed=0,
            dataset=dataset,
            token_ids=token_ids,
            mask=mask,
            sampler_logprobs=sampled_logprobs,
            turns=[Turn(start, end, 0, "stop", server, 0.0, 0.0, message=place) for place, start, end in spans],
            messages=messages,
            reward=reward,
            success=success,
            requirements=[],
            end_reason="completed",
            temperature=0.0,
            started_at=0.0,
            seconds=0.0,
            **fields,
        )

    @property
    def policy_versions(self) -> list[int]:
        """Return the distinct policy versions that sampled this rollout, ascending."""
        return sorted({turn.policy_version for turn in self.turns})

    @property
    def turns_before(self) -> int:
        """Return how many turns another rollout sampled: ``turns[0]`` is turn ``turns_before`` of the episode."""
        return self.branch_of.turns if self.branch_of is not None else 0

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def text_only(self) -> bool:
        """Return whether the rollout has no token ids, because an endpoint that takes and gives text wrote it."""
        return not self.token_ids

    def validate(self, vocabulary: int = MOST_IDS) -> Rollout:
        """Return self; raises ValueError, with the fault, for a broken invariant or a token id >= ``vocabulary``."""
        if not self.turns:
            self._refuse("no turns")
        if self.text_only:
            self._check_text()
        else:
            self._check_tokens(vocabulary)
        for number, turn in enumerate(self.turns):
            spoken = 0 <= turn.message < len(self.messages) and self.messages[turn.message]["role"] == "assistant"
            if self.messages and not spoken:
                self._refuse(f"turn {number} is message {turn.message}, which is not an assistant message")
            if turn.reward is not None and not math.isfinite(turn.reward):
                self._refuse(f"turn {number} has reward {turn.reward}")
        if self.turns_before < 0:
            self._refuse(f"it goes on after {self.turns_before} turns")
        if not 0.0 <= self.reward <= 1.0:
            self._refuse(f"reward {self.reward} outside [0, 1]")
        if self.end_reason not in END_REASONS:
            self._refuse(f"end reason {self.end_reason!r} is not one of {', '.join(END_REASONS)}")
        if not 0 <= self.segment < self.segments or (self.episode_id == self.rollout_id) != (self.segment == 0):
            self._refuse(f"sequence {self.segment} of {self.segments} of episode {self.episode_id}")
        return self

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"rollout {self.rollout_id}: {what}")

    def _check_text(self) -> None:
        if self.mask or self.sampler_logprobs:
            self._refuse(f"no token ids, {len(self.mask)} mask entries, {len(self.sampler_logprobs)} log-probs")
        for number, turn in enumerate(self.turns):
            if (turn.start, turn.end) != (0, 0):
                self._refuse(f"turn {number} spans [{turn.start}, {turn.end}) of no token ids")

    def _check_tokens(self, vocabulary: int) -> None:
        size = len(self.token_ids)
        for place, token in enumerate(self.token_ids):
            if type(token) is not int or not 0 <= token < vocabulary:
                known = f"whole numbers from 0 to {vocabulary - 1}; name the model that sampled it"
                self._refuse(f"token_ids[{place}] is {token!r}, and the ids of the model are {known}")
        if strange := {*map(type, self.sampler_logprobs)} - {int, float}:
            self._refuse(f"sampler_logprobs holds {strange.pop().__name__} beside numbers")
        if not (len(self.mask) == len(self.sampler_logprobs) == size):
            self._refuse(f"{size} token ids, {len(self.mask)} mask entries, {len(self.sampler_logprobs)} log-probs")
        expected = [False] * size
        previous_end = 1
        for number, turn in enumerate(self.turns):
            if not previous_end <= turn.start < turn.end <= size:
                self._refuse(f"turn {number} spans [{turn.start}, {turn.end}) after {previous_end} of {size}")
            expected[turn.start : turn.end] = [True] * (turn.end - turn.start)
            previous_end = turn.end
        if expected != self.mask:
            self._refuse("the mask is not the union of the turns' spans")
        for position, (sampled, logprob) in enumerate(zip(self.mask, self.sampler_logprobs, strict=True)):
            if sampled and not (math.isfinite(logprob) and POISONED_LOGPROB < logprob <= 1e-6):
                self._refuse(f"sampled token {position} has log-prob {logprob}")
            if not sampled and logprob != 0.0:
                self._refuse(f"token {position} was not sampled but has log-prob {logprob}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the lists of tokens are the rollout's own objects, not copies."""
        # Not asdict: it copies token by token, which holds up every other episode of the node for milliseconds.
        origin = self.branch_of and vars(self.branch_of)
        return {**vars(self), "turns": [vars(turn) for turn in self.turns], "branch_of": origin}

    def to_json(self) -> str:
        """Return a line of JSON, without a newline."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rollout:
        """Parse a decoded JSON object; raises ValueError on another schema or a missing or unknown field."""
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"rollout schema {data.get('schema')!r} is not {SCHEMA_VERSION}, which this version reads")
        with raised_as(ValueError, f"not a rollout of schema {SCHEMA_VERSION}: ", KeyError, TypeError):
            turns = [Turn(**turn) for turn in data["turns"]]
            origin = data["branch_of"] and BranchOf(**data["branch_of"])
            known = {name: value for name, value in data.items() if name != "tampered"}  # null in older logs
            return cls(**{**known, "turns": turns, "branch_of": origin})


@dataclass(frozen=True)
class Failure:
    """A failed attempt. Another attempt replaced it; but if it is ``final``, the rollout is lost or refused."""

    collection_id: str
    task_id: str
    index: int
    attempt: int
    reason: str
    message: str
    seconds: float
    sampled_tokens: int = 0
    final: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def by_episode(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Return a list of sequences for each episode; the episodes are in the order of their first sequences."""
    episodes = grouped((rollout.episode_id, rollout) for rollout in rollouts)
    return [sorted(segments, key=lambda rollout: rollout.segment) for segments in episodes.values()]


def sequence_texts(sequences: Iterable[Rollout]) -> list[tuple[list[dict[str, str]], list[AgentTurn]]]:
    """Return the messages of each sequence of an episode, with its turns and their observations.

    Raises:
        ValueError: the messages lack a turn.
    """
    return [
        (rollout.messages, agent_turns(rollout.messages, [t.message for t in rollout.turns if not t.summary]))
        for rollout in sequences
    ]
