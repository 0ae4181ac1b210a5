"""The trainer's request to the rollout node, and the node's answers: plain data, shared by node and client."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from agent_environments.description import environment_of
from loop_formats.branch import Branch, BranchStart
from loop_formats.schema import STRICT, from_mapping, require

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_EPISODES = 100_000

MAX_ATTEMPTS = 3
"""Attempts at one rollout, unless a request says otherwise; after the last failure it is lost."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower temperature, but for 0, to the minimum, and refuses a higher one."""


def check_temperature(temperature: float) -> None:
    """Check that tokens can be sampled at ``temperature``.

    Raises:
        ConfigError: the temperature is neither 0 nor in vLLM's range.
    """
    within = temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE
    bounds = f"0, which is greedy, or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    require(within, f"temperature must be {bounds}, as vLLM takes it, not {temperature:g}")


def _top_k(value: Any) -> Any:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return -1 if whole == 0 and whole is not False else whole


TopK = Annotated[int, Field(ge=-1, le=2**31 - 1), BeforeValidator(_top_k)]
"""A top_k; other programs write 0 for vLLM's -1, and some clients send whole numbers as floats."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Sampling:
    """The settings of the sampling. Training needs the defaults: only then are the log-probs those of the policy
    itself."""

    temperature: float = 1.0
    """0 is greedy; at most 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples from the most likely tokens that together have this probability."""
    top_k: TopK = -1
    """Samples from this many most likely tokens; -1 or 0 from all."""

    def __post_init__(self) -> None:
        check_temperature(self.temperature)


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Limits:
    """Bounds of one episode."""

    max_turns: PositiveInt = 40
    """Turns of the agent."""
    max_tokens_per_turn: PositiveInt = 1500
    """Tokens sampled in one turn; where ``max_thinking_tokens`` is given, in its answer."""
    max_thinking_tokens: PositiveInt | None = None
    """Tokens that a model may think in one turn, before the limit of its answer counts; null counts both together."""
    max_context: Annotated[int, Field(ge=2)] = 32768
    """Tokens of the whole episode, prompt and sampled ones together; with ``compaction``, of each of its sequences."""
    episode_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 1800.0
    """Seconds that the agent's actions may take in an episode, at most a day. The machine's own time does not count:
    docs/rollout_node.md, "Time"."""
    compaction: Literal["drop", "summary"] | None = None
    """The rule that begins a new sequence when the history leaves no room for a turn: ``drop`` leaves out the oldest
    observations, ``summary`` has the policy write one; null ends the episode there."""

    def __post_init__(self) -> None:
        free, most = self.kept_free, self.max_context
        require(free < most, f"compaction keeps {free} tokens free for what is sampled next, max_context is {most}")

    @property
    def kept_free(self) -> int:
        """Tokens that must remain free after an observation, or else the history is too long."""
        turn = self.max_tokens_per_turn + (self.max_thinking_tokens or 0)
        return {None: 1, "drop": turn, "summary": 2 * turn}[self.compaction]

    def check_branching(self, key: str) -> None:
        """Raise ConfigError if an episode that goes on from a stored rollout can become several sequences."""
        require(self.compaction is None, f"{key}.compaction must be null where episodes go on from stored rollouts")

    def non_null(self) -> dict[str, Any]:
        """Return the limits that are not null: so a new limit does not change the protocol of earlier runs."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, config=STRICT)
class CollectionRequest:
    """``rollouts_per_task`` episodes of each task under one policy.

    A request may have ``branches`` beside the tasks or in their place: each point of a branch counts as one more task,
    and its episodes go on from that point.

    The collection ends as soon as every task has ``min_rollouts_per_task`` (default: all) rollouts and all tasks
    together have ``min_rollouts_fraction`` of the requested ones; the node then aborts and drops the running episodes.
    ``policy_mode`` "pinned" samples whole episodes from ``policy_version``; "latest" takes, at every turn, the newest
    version. ``id`` names the log file, so it is unique per run and iteration. ``environment_turns`` says, for
    environments of a mixed pool, how many turns their episodes may take in place of ``limits.max_turns``.

    A rollout is lost when ``attempts`` at it have failed. The node no longer waits for it; the collection fails once
    more than ``max_lost`` rollouts are lost (None: once all are). ``only`` restricts some tasks to the rollouts with
    the given indices.
    """

    id: str
    tasks: list[str]
    rollouts_per_task: PositiveInt
    policy_version: NonNegativeInt
    min_rollouts_per_task: int | None = None
    min_rollouts_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0
    policy_mode: Literal["pinned", "latest"] = "pinned"
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    limits: Limits = dataclasses.field(default_factory=Limits)
    branches: list[Branch] = dataclasses.field(default_factory=list)
    environment_turns: dict[str, PositiveInt] = dataclasses.field(default_factory=dict)
    attempts: PositiveInt = MAX_ATTEMPTS
    # A request with another bound means the same rollouts.
    max_lost: NonNegativeInt | None = dataclasses.field(default=None, compare=False)
    only: dict[str, list[NonNegativeInt]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        floor, most = self.floor_per_task, self.rollouts_per_task
        require(is_collection_id(self.id), f"id {self.id[:128]!r} must be letters, digits, . _ -, at most 128 of them")
        require(self.tasks or self.branches, "tasks must be at least one task id (or branches one branch)")
        require(
            len(set(self.tasks)) == len(self.tasks), "tasks must be distinct (ask for more rollouts_per_task instead)"
        )
        for task_id, indices in self.only.items():
            require(task_id in self.tasks, f"only: {task_id} is not one of the tasks")
            some = bool(indices) and len(set(indices)) == len(indices) and max(indices) < most
            require(some, f"only: {task_id} must have at least one index, distinct, below rollouts_per_task = {most}")
        require(self.episodes <= MAX_EPISODES, f"tasks x rollouts_per_task must be at most {MAX_EPISODES}")
        require(1 <= floor <= most, f"min_rollouts_per_task must be 1 to rollouts_per_task = {most}")
        if self.branches:
            self.limits.check_branching("limits")
        for branch in self.branches:
            turns = max(point.turns for point in branch.points)
            tokens = max(point.tokens for point in branch.points)
            name, limits = f"branches: {branch.rollout_id}", self.limits
            turn_limit = self.max_turns(branch.task_id)
            require(turns < turn_limit, f"{name} goes on after {turns} turns, max_turns is {turn_limit}")
            require(
                tokens < limits.max_context,
                f"{name} goes on after {tokens} tokens, max_context is {limits.max_context}",
            )

    @property
    def floor_per_task(self) -> int:
        """Return the number of rollouts that every task must reach."""
        return self.rollouts_per_task if self.min_rollouts_per_task is None else self.min_rollouts_per_task

    @property
    def episodes(self) -> int:
        """The number of requested rollouts."""
        whole = len(self.tasks) - len(self.only) + sum(len(branch.points) for branch in self.branches)
        return whole * self.rollouts_per_task + sum(map(len, self.only.values()))

    @property
    def floor_total(self) -> int:
        """Return the number of rollouts that all tasks together must reach."""
        return max(1, math.ceil(self.min_rollouts_fraction * self.episodes - 1e-9))

    @property
    def most_lost(self) -> int:
        """The number of rollouts that may be lost."""
        return self.episodes - 1 if self.max_lost is None else self.max_lost

    def items(self) -> list[CollectionItem]:
        """Return the items that have ``rollouts_per_task`` episodes each: the tasks, then the points of the branches.

        A rollout is identified by task and index, so the indices continue over all items of a task.
        """
        starts: list[tuple[str, BranchStart | None]] = [(task_id, None) for task_id in self.tasks]
        starts += [(branch.task_id, start) for branch in self.branches for start in branch.starts()]
        taken: Counter[str] = Counter()
        items = []
        for task_id, start in starts:
            first = taken[task_id]
            taken[task_id] += self.rollouts_per_task
            indices: Sequence[int] = range(first, taken[task_id])
            items.append(CollectionItem(task_id, indices if start else self.only.get(task_id, indices), start))
        return items

    def max_turns(self, task_id: str) -> int:
        """Return how many turns an episode of this task may take."""
        return self.environment_turns.get(environment_of(task_id), self.limits.max_turns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the lists are the request's own objects, not copies."""
        branches = [branch.to_dict() for branch in self.branches]
        return {
            **vars(self),
            "sampling": {**vars(self.sampling)},
            "limits": {**vars(self.limits)},
            "branches": branches,
        }

    def protocol(self) -> dict[str, Any]:
        """Return as plain data the settings on which the rollouts depend: all but ``attempts``, ``max_lost`` and
        ``only``."""
        asked = {name: value for name, value in self.to_dict().items() if name not in ("attempts", "max_lost", "only")}
        return {**asked, "limits": self.limits.non_null()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CollectionRequest:
        """Build a request; raises ConfigError, in one line, if the data is not a valid request."""
        return from_mapping(cls, data)


@dataclasses.dataclass(frozen=True)
class CollectionItem:
    """A task and the ``indices`` of its rollouts. The rollouts begin at ``start``, or at the opening."""

    task_id: str
    indices: Sequence[int]
    start: BranchStart | None = None


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a collection, in numbers of rollouts; the collection ends with ``needed`` of them."""

    finished: int
    running: int
    waiting: int
    needed: int
    dropped: int
    failed: int
    lost: int = 0


@dataclasses.dataclass(frozen=True)
class LostRollout:
    """A rollout whose attempts all failed: its place in the collection, and why the last attempt failed."""

    task_id: str
    index: int
    reason: str
    message: str


@dataclasses.dataclass(frozen=True)
class CollectionEnd:
    """The end of a collection.

    ``reason`` is "complete" (all others are lost or refused), "early_stop" (the floors were reached), "failed" (too
    many were lost, or the disk is full: ``error`` says it) or "cancelled". ``dropped`` episodes were aborted after
    sampling ``dropped_tokens``; ``failures`` counts failed attempts by reason and ``failures_by_task`` by task;
    ``seconds`` is since the collection was last opened, ``dropped_seconds`` the time of each dropped episode. No floor
    counts a lost or refused rollout. All attempts at each of ``lost`` failed. ``refused`` maps the rollout id of each
    refused branch to the world's other answer.
    """

    reason: str
    finished: int
    dropped: int
    dropped_tokens: int
    failures: dict[str, int]
    seconds: float
    error: str | None = None
    failures_by_task: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    lost: list[LostRollout] = dataclasses.field(default_factory=list)
    dropped_seconds: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CollectionEnd:
        """Build the object from the result of ``dataclasses.asdict``."""
        return cls(**{**data, "lost": [LostRollout(**lost) for lost in data.get("lost", ())]})


def losses(lost: Sequence[LostRollout], of: int) -> str:
    """Return a line on the lost rollouts among ``of``: the number for each reason, and the last error in full."""
    last = lost[-1]
    return (
        f"{len(lost)} of {of} rollouts lost ({by_count(each.reason for each in lost)}), such as rollout {last.index} "
        f"of {last.task_id}: {last.reason}: {last.message}"
    )


def too_many_lost(lost: Sequence[LostRollout], request: CollectionRequest) -> str | None:
    """Return a line if more rollouts are lost than ``request`` allows, else None."""
    if len(lost) <= request.most_lost:
        return None
    allowed = "" if request.max_lost is None else f", where {request.max_lost} may be"
    return losses(lost, request.episodes) + allowed


def by_count(reasons: Iterable[str]) -> str:
    """Return a text that names each distinct reason with its number, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in Counter(reasons).most_common())


def is_collection_id(text: str) -> bool:
    """Return whether a text can be a collection's id. The id is used in names of files: ``<id>.meta.jsonl``."""
    return _ID.fullmatch(text) is not None and not text.endswith(".meta")


RARE_FAILURES = 0.02
"""The share of failed attempts up to which no warning is logged; one or two never cause one."""


def failures_warning(finished: int, failures: Mapping[str, int], failures_by_task: Mapping[str, int]) -> str | None:
    """Return a warning if failed attempts are not rare, else None.

    Most failed attempts are repeated with the same seeds. That does no harm if they fail by chance. But if attempts at
    a task fail often, only the rollouts that did not fail are trained on or scored.

    Args:
        finished: attempts that gave a rollout.
        failures: failed attempts by reason, and ``failures_by_task`` by task.
    """
    failed = sum(failures.values())
    if failed < 3 or failed <= RARE_FAILURES * (finished + failed):
        return None
    reasons = by_count(Counter(failures).elements())
    worst, most = max(failures_by_task.items(), key=lambda item: item[1], default=("unknown", failed))
    return (
        f"{failed} of {finished + failed} attempts failed ({reasons}), {most} of them at task "
        f"{worst}; a node's collections/*.meta.jsonl says why in full"
    )
