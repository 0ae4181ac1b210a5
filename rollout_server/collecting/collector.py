"""Decides which episode starts next, and when enough have ended: a pure state machine, no clock, no I/O.

The node reports events (:meth:`Collector.finished`, :meth:`Collector.failed`) and asks for the next step
(:meth:`Collector.start_next`, :attr:`Collector.outcome`). The benchmarks and the simulated schedules of the tests drive
this same class.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from loop_formats.branch import BranchStart
from loop_formats.collection_request import CollectionItem, CollectionRequest, LostRollout, Progress, too_many_lost
from loop_formats.ids import rollout_id
from loop_formats.rollout import BRANCH_DIFFERS, REQUEST_REFUSED

REDRAWN_REASONS = frozenset({"bad_logprob"})
"""Failure reasons after which the same seeds would sample the same useless tokens."""


@dataclass(frozen=True)
class EpisodeKey:
    """The key of an attempt at rollout ``index`` of a task."""

    task_id: str
    index: int
    attempt: int


@dataclass(frozen=True)
class MissingRollout:
    """The reason why a rollout is missing: "branch_differs" for a refused branch, any other for a lost rollout."""

    reason: str
    message: str

    @property
    def refused(self) -> bool:
        return self.reason == BRANCH_DIFFERS


@dataclass
class _ItemState:
    item: CollectionItem
    place: int
    """Its position among the items of the request."""
    waiting: deque[EpisodeKey] = field(default_factory=deque)
    running: int = 0
    finished: int = 0
    gone: int = 0
    failures: int = 0
    draws: Counter[int] = field(default_factory=Counter)
    lacks: bool = True
    """True while it has fewer rollouts than its floor."""

    @property
    def due(self) -> tuple[int, int]:
        """The item's place in the queue. The item with the smallest value starts the next episode."""
        return self.finished + self.running, self.place


class Collector:
    """Starts episodes so that the floors are reached early, replaces failed ones, and says when to stop.

    The next episode always belongs to the task with the fewest finished or running rollouts. A new collection starts
    index 0 of all tasks, then index 1 of all tasks, and so on. After failures or a restart, tasks that lag come first.
    Once the total is reached, only tasks below their own floor start episodes.

    A point of a branch counts as a task of its own. A rollout is gone if its attempts are used up (it is lost) or if
    its branch is refused. A rollout that is gone is not attempted again and counts for no floor. The collection fails
    if more rollouts are lost than the request allows.

    Args:
        request: the rollouts to collect, floors and limits.
        done: (task id, index) of rollouts that exist already.
        opened_before: how often this collection was opened before; makes attempt numbers differ between openings.
        gone: the rollouts that were lost or refused when the collection was open before.
    """

    def __init__(
        self,
        request: CollectionRequest,
        done: Iterable[tuple[str, int]] = (),
        opened_before: int = 0,
        gone: Mapping[EpisodeKey, MissingRollout] = MappingProxyType({}),
    ):
        self.request = request
        self._asked_for, self._wanted, self._most_lost = request.episodes, request.floor_total, request.most_lost
        self._first_attempt = opened_before * request.attempts
        self._items = [_ItemState(item, place) for place, item in enumerate(request.items())]
        self._item_of = {(state.item.task_id, index): state for state in self._items for index in state.item.indices}
        self._refused: dict[EpisodeKey, str] = {}
        self.lost: list[LostRollout] = []
        """The rollouts whose attempts all failed, in the order in which they were lost."""
        done, missing = set(done), {(key.task_id, key.index): (key, why) for key, why in gone.items()}
        for (task_id, index), state in self._item_of.items():
            if (task_id, index) in done:
                state.finished += 1
            elif (task_id, index) in missing:
                self._note_gone(*missing[task_id, index])
            else:
                state.waiting.append(EpisodeKey(task_id, index, self._first_attempt))
        self._finished = sum(state.finished for state in self._items)
        self._due: list[tuple[int, int]] = []
        """A heap of :attr:`_ItemState.due`; entries from before an item's last change count no more."""
        self._lacking = len(self._items)
        for state in self._items:
            self._note(state)
        self._running: set[EpisodeKey] = set()
        self.failures: Counter[str] = Counter()
        self.dropped = 0
        self.outcome: str | None = None
        """None while episodes are needed, then "complete", "early_stop", "failed" or "cancelled", for good."""
        self.error: str | None = None
        self._update_outcome()

    def group(self, key: EpisodeKey) -> tuple[int, ...]:
        """Return the indices of all rollouts in the episode's group: of its task, or of its branch's point."""
        return tuple(self._item(key).item.indices)

    def is_whole(self, key: EpisodeKey) -> bool:
        """Return whether every rollout of the episode's group is finished or gone."""
        state = self._item(key)
        return state.finished + state.gone == len(state.item.indices)

    @property
    def running(self) -> frozenset[EpisodeKey]:
        return frozenset(self._running)

    def attempts_before(self, key: EpisodeKey) -> int:
        """Return the number of failed attempts at this rollout since the collection was opened."""
        return key.attempt - self._first_attempt

    def draw(self, key: EpisodeKey) -> int:
        """Return the number of the attempt's draw, which is part of the attempt's seed.

        Attempts that failed are repeated with the same seeds: an agent must not get another draw by failing. Only
        sampled tokens that were themselves unusable (:data:`REDRAWN_REASONS`) are drawn anew.
        """
        return self._item(key).draws[key.index]

    def start_of(self, key: EpisodeKey) -> BranchStart | None:
        """Return the point of a stored rollout from which this rollout continues; None means the task's opening."""
        return self._item(key).item.start

    def start_next(self) -> EpisodeKey | None:
        """Return the episode to start now, and count it as running. Return None if no episode is to start."""
        if self.outcome is not None:
            return None
        total_reached = self._finished >= self._floor_total
        while self._due:
            due = heapq.heappop(self._due)
            state = self._items[due[1]]
            if due != state.due or not state.waiting or (total_reached and not state.lacks):
                continue
            key = state.waiting.popleft()
            state.running += 1
            self._running.add(key)
            self._note(state)
            return key
        return None

    def finished(self, key: EpisodeKey) -> None:
        """Count an episode whose rollout is on disk, even if the collection ended while the rollout was written."""
        state = self._leave(key)
        state.finished += 1
        self._finished += 1
        self._note(state)
        if self.outcome is None:
            self._update_outcome()

    def failed(self, key: EpisodeKey, reason: str, message: str) -> bool:
        """Count a failed attempt, and queue another unless the rollout is gone. Return whether the rollout is gone.

        A refused branch or request is not repeated, as it would be refused again.
        """
        state, gone = self._leave(key), MissingRollout(reason, message)
        if not gone.refused:
            self.failures[reason] += 1
            state.failures += 1
            state.draws[key.index] += reason in REDRAWN_REASONS
            if reason != REQUEST_REFUSED and self.attempts_before(key) + 1 < self.request.attempts:
                state.waiting.appendleft(EpisodeKey(key.task_id, key.index, key.attempt + 1))
                self._note(state)
                return False
        self._note_gone(key, gone)
        self._note(state)
        if self.outcome is None:
            self._update_outcome()
        return True

    def drop(self, key: EpisodeKey) -> None:
        """Count a running episode that was aborted."""
        self._leave(key)
        self.dropped += 1

    def end_early(self) -> bool:
        """End the collection if all tasks have reached their floors. Return whether it has ended, now or before."""
        if not self._lacking:
            self.stop("early_stop")
        return self.outcome is not None

    def stop(self, outcome: str, error: str | None = None) -> None:
        """End the collection on request from outside, as "cancelled" or, with a reason, as "failed"."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error

    @property
    def failures_by_task(self) -> dict[str, int]:
        """The number of failed attempts of each task, without zeros."""
        failures: Counter[str] = Counter()
        for state in self._items:
            failures[state.item.task_id] += state.failures
        return dict(+failures)

    @property
    def refused(self) -> dict[str, str]:
        """The reasons why branches were refused, by the ids of the missing rollouts."""
        return {
            rollout_id(self.request.id, key.task_id, key.index, key.attempt): why for key, why in self._refused.items()
        }

    def progress(self) -> Progress:
        return Progress(
            finished=self._finished,
            running=len(self._running),
            waiting=sum(len(state.waiting) for state in self._items),
            needed=self._floor_total,
            dropped=self.dropped,
            failed=self.failures.total(),
            lost=len(self.lost),
        )

    @property
    def _possible(self) -> int:
        """The number of requested rollouts that are not gone."""
        return self._asked_for - len(self._refused) - len(self.lost)

    @property
    def _floor_total(self) -> int:
        return min(self._wanted, self._possible)

    def _note(self, state: _ItemState) -> None:
        """Update the queue and the floors after a rollout of the item has begun, ended or gone."""
        if state.waiting:
            heapq.heappush(self._due, state.due)
        if state.lacks and state.finished >= min(self.request.floor_per_task, len(state.item.indices) - state.gone):
            state.lacks = False
            self._lacking -= 1

    def _item(self, key: EpisodeKey) -> _ItemState:
        return self._item_of[key.task_id, key.index]

    def _note_gone(self, key: EpisodeKey, why: MissingRollout) -> None:
        self._item(key).gone += 1
        if why.refused:
            self._refused[key] = why.message
        else:
            self.lost.append(LostRollout(key.task_id, key.index, why.reason, why.message))

    def _leave(self, key: EpisodeKey) -> _ItemState:
        self._running.remove(key)
        state = self._item(key)
        state.running -= 1
        return state

    def _update_outcome(self) -> None:
        if len(self.lost) > self._most_lost:
            self.stop("failed", too_many_lost(self.lost, self.request))
        elif self._finished == self._possible:
            self.outcome = "complete"
        elif self._finished >= self._floor_total and not self._lacking:
            self.outcome = "early_stop"
