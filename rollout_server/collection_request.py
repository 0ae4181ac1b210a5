"""What a trainer asks of the rollout node, and what it is told of it: plain data, shared by node and client."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout_server.config import ConfigError, from_mapping

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
POLICY_MODES = ("pinned", "latest")
MAX_EPISODES = 100_000


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Training needs the defaults: log-probs are then those of the policy itself."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Limits:
    """Bounds of one episode. ``max_context`` counts prompt and sampled tokens together; the deadline starts with the
    episode's world, not while it waits for one."""

    max_turns: int = 40
    max_tokens_per_turn: int = 1500
    max_context: int = 32768
    episode_deadline_s: float = 1800.0


@dataclass(frozen=True)
class CollectionRequest:
    """``rollouts_per_task`` episodes of each task under one policy.

    The collection ends as soon as every task has ``min_rollouts_per_task`` (default: all) rollouts and all tasks
    together have ``min_rollouts_fraction`` of those asked for; what still runs is then aborted and dropped.
    ``policy_mode`` "pinned" samples whole episodes from ``policy_version``; "latest" takes, at every turn, the newest
    version there is. ``id`` names the log file, so it is unique per run and iteration.
    """

    id: str
    tasks: list[str]
    rollouts_per_task: int
    policy_version: int
    min_rollouts_per_task: int | None = None
    min_rollouts_fraction: float = 1.0
    seed: int = 0
    policy_mode: str = "pinned"
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        floor, most = self.floor_per_task, self.rollouts_per_task
        _require(_ID.fullmatch(self.id) and not self.id.endswith(".meta"), f"id {self.id!r}", "letters, digits, . _ -")
        _require(bool(self.tasks), "tasks", "at least one task id")
        _require(len(set(self.tasks)) == len(self.tasks), "tasks", "distinct (ask for more rollouts_per_task instead)")
        _require(most >= 1, "rollouts_per_task", "at least 1")
        _require(len(self.tasks) * most <= MAX_EPISODES, "tasks x rollouts_per_task", f"at most {MAX_EPISODES}")
        _require(1 <= floor <= most, "min_rollouts_per_task", f"1 to rollouts_per_task = {most}")
        _require(0.0 < self.min_rollouts_fraction <= 1.0, "min_rollouts_fraction", "above 0 and at most 1")
        _require(self.policy_version >= 0, "policy_version", "0 or more")
        _require(self.policy_mode in POLICY_MODES, "policy_mode", " or ".join(POLICY_MODES))
        _require(0.0 <= self.sampling.temperature <= 10.0, "sampling.temperature", "0 to 10")
        _require(0.0 < self.sampling.top_p <= 1.0, "sampling.top_p", "above 0 and at most 1")
        _require(self.sampling.top_k == -1 or self.sampling.top_k >= 1, "sampling.top_k", "-1 or at least 1")
        _require(self.limits.max_turns >= 1, "limits.max_turns", "at least 1")
        _require(self.limits.max_tokens_per_turn >= 1, "limits.max_tokens_per_turn", "at least 1")
        _require(self.limits.max_context >= 2, "limits.max_context", "at least 2")
        _require(
            0.0 < self.limits.episode_deadline_s <= 86_400.0, "limits.episode_deadline_s", "above 0, at most a day"
        )

    @property
    def floor_per_task(self) -> int:
        """Rollouts that every task must reach."""
        return self.rollouts_per_task if self.min_rollouts_per_task is None else self.min_rollouts_per_task

    @property
    def episodes(self) -> int:
        """Rollouts asked for."""
        return len(self.tasks) * self.rollouts_per_task

    @property
    def floor_total(self) -> int:
        """Rollouts that all tasks together must reach."""
        return max(1, math.ceil(self.min_rollouts_fraction * self.episodes - 1e-9))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CollectionRequest:
        """Raises ConfigError, in one line, on anything that is not a sound request."""
        return from_mapping(cls, data)


def _require(holds: Any, what: str, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{what} must be {expected}")


@dataclass(frozen=True)
class Progress:
    """Where a collection stands; all are counts of rollouts but ``needed``, the rollouts that end it."""

    finished: int
    running: int
    waiting: int
    needed: int
    dropped: int
    failed: int


@dataclass(frozen=True)
class CollectionEnd:
    """How a collection ended.

    ``reason`` is "complete" (all that was asked for), "early_stop" (the floors were reached) or "failed" (they could
    not be: ``error`` says why) or "cancelled". ``dropped`` episodes were aborted after sampling ``dropped_tokens``;
    ``failures`` counts failed attempts by reason and ``failures_by_task`` by task, where there were any; ``seconds`` is
    since the collection was last opened.
    """

    reason: str
    finished: int
    dropped: int
    dropped_tokens: int
    failures: dict[str, int]
    seconds: float
    error: str | None = None
    failures_by_task: dict[str, int] = field(default_factory=dict)


RARE_FAILURES = 0.02
"""Share of attempts up to which failed ones are no news. One or two of them never are."""


def failures_warning(finished: int, failures: Mapping[str, int], failures_by_task: Mapping[str, int]) -> str | None:
    """One line if failed attempts are not rare, else None.

    They are repeated with the same seeds, which does no harm while it is chance that makes them fail. But a task whose
    attempts fail over and over is trained or scored on those of its rollouts that did not.

    Args:
        finished: attempts that gave a rollout.
        failures: failed attempts by reason, and ``failures_by_task`` by task.
    """
    failed = sum(failures.values())
    if failed < 3 or failed <= RARE_FAILURES * (finished + failed):
        return None
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items(), key=lambda item: -item[1]))
    worst, most = max(failures_by_task.items(), key=lambda item: item[1], default=("unknown", failed))
    return (
        f"{failed} of {finished + failed} attempts failed and were repeated ({reasons}), {most} of them at task "
        f"{worst}; the collection's .meta.jsonl says why in full"
    )
