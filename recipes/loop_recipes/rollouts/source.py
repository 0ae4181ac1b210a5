"""The interface through which the recipe gets rollouts, and the form they come in. Sources live on rank 0 only."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agent_environments.description import Description
from loop_formats.collection_request import (
    RARE_FAILURES,
    CollectionEnd,
    CollectionRequest,
    failures_warning,
    losses,
    too_many_lost,
)
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import Rollout, by_episode
from loop_recipes.rollouts.broken import EnvironmentBroke, broken_lines, broken_rollouts, hopeless_lines
from rollout_server.client import CollectionFailed, NodeUnreachable, RolloutNodeError
from rollout_server.node_process import NodeDied

logger = logging.getLogger(__name__)


class NoRollouts(RuntimeError):
    """Rollouts are missing or invalid; the message says why."""


SMALLEST_GROUP = 2
"""The fewest rollouts of a task to learn from: one has nothing to be compared with."""

SOURCE_ERRORS = (NoRollouts, EnvironmentBroke, CollectionFailed, NodeDied, NodeUnreachable, RolloutNodeError)
"""Errors of a source that cannot deliver; each message is for the user."""


@dataclass(frozen=True)
class Collected:
    """A finished collection; ``seconds_waiting`` is how long this process waited for it."""

    rollouts: list[Rollout]
    end: CollectionEnd
    seconds_waiting: float

    def metrics(self) -> dict[str, float]:
        """Return the figures of the collection itself for ``metrics.jsonl``."""
        left = Counter(rollout.task_id for rollout in self.rollouts if rollout.segment == 0)
        tasks = left.keys() | {lost.task_id for lost in self.end.lost}
        return {
            "lost_rollouts": len(self.end.lost),
            "tasks_left_out": sum(left[task_id] < SMALLEST_GROUP for task_id in tasks),
            "dropped_rollouts": self.end.dropped,
            "all_rollouts": self.end.finished + self.end.dropped,
            "all_sampled_tokens": sum(r.sampled_tokens for r in self.rollouts) + self.end.dropped_tokens,
            "failed_attempts": sum(self.end.failures.values()),
            "failed_attempts_worst_task": max(self.end.failures_by_task.values(), default=0),
            "ungradable_rollouts": sum(r.ungradable is not None for r in self.rollouts if r.segment == 0),
            "broken_rollouts": len(broken_rollouts(self.rollouts)),
            "seconds_collecting": self.end.seconds,
            "seconds_waiting": self.seconds_waiting,
        }

    def joined(self, later: Collected) -> Collected:
        """Return this collection joined with a later round of refill."""
        end = merge_ends([self.end, later.end])
        return Collected(
            rollouts=self.rollouts + later.rollouts,
            end=replace(end, seconds=self.end.seconds + later.end.seconds),
            seconds_waiting=self.seconds_waiting + later.seconds_waiting,
        )

    def pack(self) -> dict[str, Any]:
        """Return JSON-able data for the other ranks; it has no texts, because no update reads them."""
        without: dict[str, list[Any]] = {"messages": [], "requirements": []}
        rollouts = [{**rollout.to_dict(), **without} for rollout in self.rollouts]
        return {"rollouts": rollouts, "end": asdict(self.end), "seconds_waiting": self.seconds_waiting}

    @classmethod
    def unpack(cls, data: Mapping[str, Any]) -> Collected:
        """Undo :meth:`pack`; the texts stay empty."""
        rollouts = [Rollout.from_dict(record) for record in data["rollouts"]]
        return cls(rollouts, CollectionEnd.from_dict(data["end"]), data["seconds_waiting"])


def merge_ends(ends: Sequence[CollectionEnd]) -> CollectionEnd:
    """Merge the ends of a collection's shares into the end of the whole; the shares ran at once and did not fail."""
    failures: Counter[str] = Counter()
    by_task: Counter[str] = Counter()
    for end in ends:
        failures.update(end.failures)
        by_task.update(end.failures_by_task)
    return CollectionEnd(
        reason="complete" if all(end.reason == "complete" for end in ends) else "early_stop",
        finished=sum(end.finished for end in ends),
        dropped=sum(end.dropped for end in ends),
        dropped_tokens=sum(end.dropped_tokens for end in ends),
        failures=dict(failures),
        failures_by_task=dict(by_task),
        refused={rollout_id: why for end in ends for rollout_id, why in end.refused.items()},
        lost=[lost for end in ends for lost in end.lost],
        dropped_seconds=[seconds for end in ends for seconds in end.dropped_seconds],
        seconds=max(end.seconds for end in ends),
    )


class CollectionSource(Protocol):
    """The interface through which the recipe gets its rollouts."""

    def wait_ready(self) -> list[int]:
        """Wait until collections can be asked for; returns the policy versions that are served already."""

    def check_model(self, vocabulary: int, contexts: range) -> None:
        """Raise an error if a ready node's vocabulary or its servers' number of tokens does not fit the policy's
        ``vocabulary`` and ``contexts``."""

    def tasks(self, split: str) -> tuple[str, list[str]]:
        """Return the name of the dataset and the tasks of a split."""

    def description(self) -> Description:
        """Return the environment's description of itself."""

    def publish(self, version: int, folder: Path, canary: Mapping[str, Any] | None = None) -> None:
        """Serve the PEFT adapter in ``folder`` as ``version``; the node compares its log-probs with ``canary``."""

    def retire(self, version: int) -> None:
        """Stop serving ``version``; do nothing if it is not served."""

    def sleep(self) -> None:
        """Free the GPUs that servers share with the trainer, for the trainer."""

    def wake(self) -> None:
        """Have servers on shared GPUs sample again, with the versions that they served before."""

    def start(self, request: CollectionRequest) -> None:
        """Ask for a collection without waiting; asking again is harmless."""

    def read(self, request: CollectionRequest, deadline_s: float = math.inf) -> Collected:
        """Wait for a started collection, at most ``deadline_s`` or the source's own deadline, whichever is less."""

    def close(self) -> None:
        """Release all resources; a launched node is stopped."""


def collect(source: CollectionSource, request: CollectionRequest) -> Collected:
    """Start a collection (or find it again) and wait for its end. Raises StopRequested as the source does."""
    try:
        source.start(request)
        collected = source.read(request)
    except CollectionFailed as error:
        if request.max_lost is None or too_many_lost(error.end.lost, request) is None:
            raise
        cure = (
            "mend what the reasons name (a node's collections/*.meta.jsonl has all of them) and start again with "
            "resume_from_checkpoint=True, or raise collection.max_lost_share"
        )
        raise CollectionFailed(f"{error}; {cure}", error.end) from error
    name = parse_collection_id(request.id)
    first = name.iteration == 1 and not name.refill
    log_problems(collected, f"collection {request.id}", request.episodes, source, first)
    return collected


def log_problems(collected: Collected, which: str, asked: int, source: CollectionSource, first: bool) -> None:
    """Log the problems of a training collection of ``asked`` rollouts; for a run's ``first``, also problems that make
    the run hopeless."""
    end, rollouts = collected.end, len(by_episode(collected.rollouts))
    if end.lost:
        logger.warning("%s goes on with what it has: %s", which, losses(end.lost, asked))
    if warning := failures_warning(end.finished, end.failures, end.failures_by_task):
        logger.warning("%s: %s", which, warning)
    ungradable = collected.metrics()["ungradable_rollouts"]
    if ungradable > RARE_FAILURES * rollouts:
        logger.warning(
            "%s: %d of %d rollouts ended in a state that could not be graded, and count as reward 0",
            which,
            ungradable,
            rollouts,
        )
    lines = broken_lines(collected.rollouts)
    if first:
        lines += hopeless_lines(collected.rollouts, source.description())
    for line in lines:
        logger.warning("%s: %s", which, line)


def read_not_lost(source: CollectionSource, request: CollectionRequest) -> list[Rollout]:
    """Wait for a started collection and return its rollouts, [] if all are lost. Raises the source's errors."""
    try:
        collected = source.read(request)
        rollouts, lost = collected.rollouts, collected.end.lost
    except CollectionFailed as error:
        if too_many_lost(error.end.lost, request) is None:
            raise
        rollouts, lost = [], error.end.lost
    if lost:
        logger.warning("collection %s: %s", request.id, losses(lost, request.episodes))
    return rollouts


def in_groups(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts of tasks with at least :data:`SMALLEST_GROUP` episodes.

    Raises:
        NoRollouts: no task has so many episodes.
    """
    sizes = Counter(rollout.task_id for rollout in rollouts if rollout.segment == 0)
    grouped = [rollout for rollout in rollouts if sizes[rollout.task_id] >= SMALLEST_GROUP]
    if not grouped:
        raise NoRollouts(f"none of {len(sizes)} tasks has {SMALLEST_GROUP} rollouts to compare")
    return grouped


def check_versions(rollouts: Sequence[Rollout], oldest: int, newest: int) -> None:
    """Refuse rollouts of policies that the update may not mix.

    Raises:
        NoRollouts: a token was sampled by a policy version outside ``oldest`` to ``newest``.
    """
    for rollout in rollouts:
        if not all(oldest <= version <= newest for version in rollout.policy_versions):
            raise NoRollouts(
                f"rollout {rollout.rollout_id} was sampled by policy versions {rollout.policy_versions}; the update "
                f"takes {oldest} to {newest} (collection.max_policy_lag)"
            )
