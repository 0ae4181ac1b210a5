"""Which episode starts next, and when enough have ended: a pure state machine, no clock, no I/O.

The node tells it what happened (:meth:`Collector.finished`, :meth:`Collector.failed`) and asks what to do
(:meth:`Collector.start_next`, :attr:`Collector.outcome`). The benchmarks and the simulated schedules of the tests drive
this same class.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout_server.collection_request import CollectionRequest, Progress

MAX_ATTEMPTS = 3
"""Attempts at one rollout; after the last failure it is given up, and the others must reach the floors."""

REDRAWN = frozenset({"bad_logprob"})
"""Failure reasons after which the same seeds would give the same useless tokens."""


@dataclass(frozen=True)
class EpisodeKey:
    """One attempt at rollout ``index`` of a task."""

    task_id: str
    index: int
    attempt: int


@dataclass
class _TaskState:
    waiting: deque[EpisodeKey]
    running: int = 0
    finished: int = 0
    given_up: int = 0
    failures: int = 0
    draws: Counter[int] = field(default_factory=Counter)


class Collector:
    """Starts episodes so that the floors are reached early, replaces failed ones, and says when to stop.

    The next episode is always one of the task with the fewest rollouts finished or on their way. From an empty start
    this is index 0 of all tasks, then index 1 of all tasks, and so on; when episodes fail, or after a restart, the
    tasks that lag come first. Once the total is reached and only some tasks are below their own floor, the others
    start nothing more.

    Args:
        request: what is collected.
        done: (task id, index) of rollouts that are there already.
        opened_before: how often this collection was opened before; keeps the attempt numbers of its openings apart.
    """

    def __init__(self, request: CollectionRequest, done: Iterable[tuple[str, int]] = (), opened_before: int = 0):
        self.request = request
        self._first_attempt = opened_before * MAX_ATTEMPTS
        done = set(done)
        self._tasks: dict[str, _TaskState] = {}
        for task_id in request.tasks:
            indices = range(request.rollouts_per_task)
            waiting = [EpisodeKey(task_id, i, self._first_attempt) for i in indices if (task_id, i) not in done]
            self._tasks[task_id] = _TaskState(deque(waiting), finished=len(indices) - len(waiting))
        self._finished = sum(state.finished for state in self._tasks.values())
        self._running: set[EpisodeKey] = set()
        self.failures: Counter[str] = Counter()
        self.dropped = 0
        self.outcome: str | None = None
        """None while episodes are needed, then "complete", "early_stop", "failed" or "cancelled", for good."""
        self.error: str | None = None
        self._update_outcome()

    @property
    def running(self) -> frozenset[EpisodeKey]:
        return frozenset(self._running)

    def attempts_before(self, key: EpisodeKey) -> int:
        """Failed attempts at this rollout since the collection was opened."""
        return key.attempt - self._first_attempt

    def draw(self, key: EpisodeKey) -> int:
        """Which draw of this rollout the attempt is: part of its seed.

        Attempts that failed are repeated with the same seeds: what an agent does must not be a way to another draw.
        Only sampled tokens that were themselves unusable (:data:`REDRAWN`) are drawn anew.
        """
        return self._tasks[key.task_id].draws[key.index]

    def start_next(self) -> EpisodeKey | None:
        """The episode to start now, which then counts as running; None when none is to be started."""
        if self.outcome is not None:
            return None
        total_reached = self._finished >= self.request.floor_total
        best: _TaskState | None = None
        for state in self._tasks.values():
            if not state.waiting or (total_reached and state.finished >= self.request.floor_per_task):
                continue
            if best is None or state.finished + state.running < best.finished + best.running:
                best = state
        if best is None:
            return None
        key = best.waiting.popleft()
        best.running += 1
        self._running.add(key)
        return key

    def finished(self, key: EpisodeKey) -> None:
        """The episode's rollout is on disk. Counted even after the end, if it was written when the end came."""
        state = self._leave(key)
        state.finished += 1
        self._finished += 1
        if self.outcome is None:
            self._update_outcome()

    def failed(self, key: EpisodeKey, reason: str, message: str) -> None:
        """The attempt came to nothing: it is replaced, or given up after :data:`MAX_ATTEMPTS`."""
        state = self._leave(key)
        self.failures[reason] += 1
        state.failures += 1
        state.draws[key.index] += reason in REDRAWN
        if self.attempts_before(key) + 1 < MAX_ATTEMPTS:
            state.waiting.appendleft(EpisodeKey(key.task_id, key.index, key.attempt + 1))
            return
        state.given_up += 1
        if self.outcome is None:
            self._check_floors_can_be_reached(key, reason, message)

    def drop(self, key: EpisodeKey) -> None:
        """The running episode was aborted."""
        self._leave(key)
        self.dropped += 1

    def stop(self, outcome: str, error: str | None = None) -> None:
        """End from outside: "cancelled", or "failed" with the reason."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error

    @property
    def failures_by_task(self) -> dict[str, int]:
        """Failed attempts of each task that had any."""
        return {task_id: state.failures for task_id, state in self._tasks.items() if state.failures}

    def progress(self) -> Progress:
        return Progress(
            finished=self._finished,
            running=len(self._running),
            waiting=sum(len(state.waiting) for state in self._tasks.values()),
            needed=self.request.floor_total,
            dropped=self.dropped,
            failed=self.failures.total(),
        )

    def _leave(self, key: EpisodeKey) -> _TaskState:
        self._running.remove(key)
        state = self._tasks[key.task_id]
        state.running -= 1
        return state

    def _update_outcome(self) -> None:
        if self._finished == self.request.episodes:
            self.outcome = "complete"
        elif self._finished >= self.request.floor_total and all(
            state.finished >= self.request.floor_per_task for state in self._tasks.values()
        ):
            self.outcome = "early_stop"

    def _check_floors_can_be_reached(self, key: EpisodeKey, reason: str, message: str) -> None:
        request = self.request
        per_task = request.rollouts_per_task - self._tasks[key.task_id].given_up
        total = request.episodes - sum(state.given_up for state in self._tasks.values())
        if per_task < request.floor_per_task:
            short = f"task {key.task_id} can reach {per_task} of the {request.floor_per_task} rollouts it needs"
        elif total < request.floor_total:
            short = f"all tasks together can reach {total} of the {request.floor_total} rollouts needed"
        else:
            return
        self.stop("failed", f"{short}: {MAX_ATTEMPTS} attempts each failed, the last with {reason}: {message}")
