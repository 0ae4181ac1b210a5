"""A collection that is being worked on, and its files.

``<id>.jsonl`` holds one rollout per line. ``<id>.meta.jsonl`` holds, one object per line: ``{"request": ...}`` first,
``{"opened": n}`` each time work began, ``{"failure": ...}`` per failed attempt, ``{"end": ...}`` when work ended. A
collection whose last opening has no end was interrupted, and goes on from its files: lost rollouts stay lost. One that
goes on after its end attempts the lost ones anew.

If the environment grades the rollouts of a task together, an episode is finished before it has its reward. It waits in
``<id>.held``, one episode a line, until its group is whole, or the collection has enough rollouts. The grades are then
noted as ``{"group": {"task_id", "grades"}}`` in the meta file, and only after that are the rollouts written, with them.
So a group is graded once, whichever process dies: the noted grade counts. An episode that comes later, because it had
been lost, is graded beside the others, whose grades stand.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_environments.groups import grade_group
from agent_environments.protocol import Broke, Grade, Requirement
from loop_formats.branch import BranchStart
from loop_formats.collection_request import CollectionEnd, CollectionRequest, failures_warning
from loop_formats.rollout import BRANCH_DIFFERS, Failure, Rollout
from loop_formats.run_files import held_path, log_path, meta_path
from loop_plumbing.breakage import MAX_ERROR_CHARACTERS, error_line
from loop_plumbing.sanitize import sanitize
from rollout_server.collecting.attempt import Attempt, regraded
from rollout_server.collecting.collector import Collector, EpisodeKey, MissingRollout
from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.collecting.rollout_log import AppendLog, beside

logger = logging.getLogger(__name__)

GRADED_ENDS = ("complete", "early_stop")
"""Ends of a collection at which the groups that still wait are graded; after others the collection may go on."""

NewAttempt = Callable[[EpisodeKey, int, CollectionRequest, str | None, BranchStart | None], Attempt]
"""Builds an attempt from its key, its draw, the request, the model's name (None in mode "latest"), and the point of a
stored rollout that it goes on from."""


@dataclass
class HeldEpisode:
    """An episode that waits for its group. ``group_input`` is the episode's input to the group's grader. ``lines`` are
    the episode's rollouts as JSON, until the log holds them."""

    group_input: Mapping[str, Any]
    lines: list[str]

    def line(self, key: EpisodeKey) -> str:
        """Return the episode as one line of JSON, without a newline."""
        named = json.dumps({"task_id": key.task_id, "index": key.index, "seen": self.group_input}, allow_nan=False)
        return f'{named[:-1]}, "rollouts": [{",".join(self.lines)}]}}'


class StoredCollection:
    """The files of one collection, read and recovered."""

    def __init__(self, folder: Path, collection_id: str):
        self.request: dict[str, Any] | None = None
        self.opened = 0
        self.end: CollectionEnd | None = None
        self.done: set[tuple[str, int]] = set()
        self.gone: dict[EpisodeKey, MissingRollout] = {}
        self.graded: dict[tuple[str, int], Grade] = {}
        """The grades of groups, by task and index."""
        self.held: dict[tuple[str, int], HeldEpisode] = {}
        self._expected: tuple[str, int] | None = None
        self.meta = AppendLog(meta_path(folder, collection_id), self._visit_meta)
        self.rollouts = AppendLog(log_path(folder, collection_id), self._visit_rollout)
        self._held_path = held_path(folder, collection_id)
        self._held_log: AppendLog | None = None
        if self.request is None or self._is_graded:  # the rest of one whose other files were removed, or that ended
            self._held_path.unlink(missing_ok=True)
        elif self._held_path.exists():
            self._open_held()

    @staticmethod
    def exists(folder: Path, collection_id: str) -> bool:
        return meta_path(folder, collection_id).exists()

    def _visit_meta(self, record: Any) -> bool:
        match record:
            case {"request": dict(request)}:
                self.request = request
            case {"opened": int(count)}:
                self._note_opening(count)
            case {"end": dict(end)}:
                self.end = CollectionEnd.from_dict(end)
            case {"failure": dict(failure)}:
                if failure.get("final") or failure.get("reason") == BRANCH_DIFFERS:
                    key = EpisodeKey(failure["task_id"], failure["index"], failure["attempt"])
                    self.gone[key] = MissingRollout(failure["reason"], failure["message"])
            case {"group": {"task_id": str(task_id), "grades": dict(grades)}}:
                self.graded |= {(task_id, int(index)): _stored_grade(fields) for index, fields in grades.items()}
            case _:
                raise ValueError("not a record of a collection's meta file")
        return True

    def _visit_rollout(self, record: Any) -> bool:
        match record:
            case {"task_id": str(task_id), "index": int(index), "segment": int(segment), "segments": int(segments)}:
                episode, whole = record["episode_id"], segment + 1 == segments
                if segment and (episode, segment) != self._expected:
                    raise ValueError("a sequence of its episode before it is missing")
                self._expected = (episode, segment + 1)
                if whole:
                    self.done.add((task_id, index))
                return whole
            case _:
                raise ValueError("not a rollout")

    @property
    def _is_graded(self) -> bool:
        """True once all groups of the collection are graded and no more episodes can come."""
        return self.end is not None and self.end.reason in GRADED_ENDS and not self.end.lost

    def _visit_held(self, record: Any) -> bool:
        match record:
            case {"task_id": str(task_id), "index": int(index), "seen": dict(group_input), "rollouts": list(rollouts)}:
                undelivered = [] if (task_id, index) in self.done else rollouts
                lines = [json.dumps(rollout, separators=(",", ":"), allow_nan=False) for rollout in undelivered]
                self.held[task_id, index] = HeldEpisode(group_input, lines)
                return True
            case _:
                raise ValueError("not an episode that waits for its group")

    def _open_held(self) -> AppendLog:
        if self._held_log is None:
            self._held_log = AppendLog(self._held_path, self._visit_held)
        return self._held_log

    def hold(self, lines: Sequence[str]) -> None:
        """Store episodes on disk until their groups are graded. Raises OSError if the disk refuses them."""
        self._open_held().append(lines)

    def note_grades(self, task_id: str, grades: Mapping[int, Grade]) -> None:
        """Store the final grades of a group by rollout index. Raises OSError if the disk refuses them."""
        plain = {str(index): asdict(grade) for index, grade in grades.items()}
        self.meta.append([json.dumps({"group": {"task_id": task_id, "grades": plain}}, allow_nan=False)])
        self.graded |= {(task_id, index): grade for index, grade in grades.items()}

    def drop_held(self) -> None:
        """Remove the file of waiting episodes, once all groups are graded and no more episodes can come."""
        self.held.clear()
        self._held_log = None
        self._held_path.unlink(missing_ok=True)

    def begin(self, request: CollectionRequest) -> None:
        """Note on disk that work begins (again). Raises OSError if the disk refuses that."""
        known = self.request is not None and self.request.get("max_lost") == request.max_lost
        lines = [] if known else [json.dumps({"request": request.to_dict()})]
        self.meta.append([*lines, json.dumps({"opened": self.opened + 1, "at": time.time()})])
        self.request = request.to_dict()
        self._note_opening(self.opened + 1)

    def _note_opening(self, count: int) -> None:
        if self.end is not None:  # the client that asked again has mended the cause
            self.gone = {key: gone for key, gone in self.gone.items() if gone.refused}
        self.opened, self.end = count, None


def _stored_grade(fields: Mapping[str, Any]) -> Grade:
    requirements = tuple(Requirement(**each) for each in fields["requirements"])
    broke = fields["broke"] and Broke(**fields["broke"])
    return Grade(**{**fields, "requirements": requirements, "broke": broke, "tools": ()})


@dataclass
class _Running:
    episode: Attempt
    task: asyncio.Task[None]
    since: float
    delivering: bool = False
    aborted: bool = False
    """True once this collection has cancelled its task."""

    def abort(self) -> None:
        self.aborted = True
        self.task.cancel()

    @property
    def ended_from_outside(self) -> bool:
        """True if this collection's abort, or the end of the event loop, caused the exception of the episode's task.

        CancelledError and GeneratorExit alone prove nothing: any code in the task can cause them.
        """
        try:
            return self.aborted or asyncio.current_task() is not self.task
        except RuntimeError:  # no loop: its coroutine is being closed
            return True


@dataclass
class CollectionRun:
    """Runs the episodes of one collection. The node calls :meth:`launch` when it may run another episode.

    ``on_change`` is called after each episode, and when the collection has ended. ``on_idle`` is called once the
    collection has ended and its last episode has closed its world.
    """

    request: CollectionRequest
    stored: StoredCollection
    services: EpisodeServices
    new_attempt: NewAttempt
    pinned_model: str | None
    on_change: Callable[[], None]
    on_idle: Callable[[], None]
    end: CollectionEnd | None = None
    dropped_tokens: int = 0
    dropped_seconds: list[float] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    """Finished rollouts that the disk would not take; written when the collection is asked for again."""
    unheld: list[str] = field(default_factory=list)
    """Episodes that wait for their group and that the disk would not take."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new event, at every change that a reader waits for."""

    def __post_init__(self) -> None:
        there = {*self.stored.done, *self.stored.held}
        self.collector = Collector(self.request, there, self.stored.opened - 1, self.stored.gone)
        self._grading: set[tuple[str, int]] = set()
        self._running: dict[EpisodeKey, _Running] = {}
        self._pending: list[tuple[EpisodeKey, list[str]]] = []
        self._write_lock = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._started = time.monotonic()
        self._launched: float | None = None
        if self.end is None:
            self._settle()
        else:
            self.collector.stop(self.end.reason, self.end.error)

    @property
    def state(self) -> str:
        """ "running", or the reason why the collection ended."""
        return "running" if self.end is None else self.end.reason

    @property
    def episodes_running(self) -> int:
        """The number of running episodes, including aborted episodes that are still closing their worlds."""
        return len(self._running)

    def facts(self) -> dict[str, Any]:
        """Return id, state, progress, and the seconds since the first episode began: 0 before it and after the end."""
        seconds = 0.0 if self._launched is None or self.end is not None else time.monotonic() - self._launched
        return {"id": self.request.id, "state": self.state, "seconds": seconds, **asdict(self.collector.progress())}

    @property
    def idle(self) -> bool:
        """True once the collection has ended and none of its episodes is left."""
        return self.end is not None and not self._running

    def launch(self, key: EpisodeKey) -> None:
        """Start the episode that the collector has chosen."""
        draw, start = self.collector.draw(key), self.collector.start_of(key)
        episode = self.new_attempt(key, draw, self.request, self.pinned_model, start)
        task = asyncio.create_task(self._run(episode), name=episode.rollout_id)
        now = time.monotonic()
        self._launched = self._launched or now
        self._running[key] = _Running(episode, task, now)
        # Not a finally of _run, whose body is never entered where the task is cancelled before its first step.
        task.add_done_callback(lambda _: self._leave(key))

    def end_early(self) -> bool:
        """If every task has reached its floor, drop running episodes and end. Return whether the collection ends."""
        ended = self.collector.end_early()
        self._settle()
        return ended

    async def cancel(self) -> None:
        """End the collection: drop running episodes and keep finished ones. If the collection is requested again later,
        it attempts its lost rollouts again."""
        cancelled = "cancelled", "the collection was cancelled"
        self.collector.stop(*cancelled)
        self._settle()
        if self.end is not None and self.end.lost:
            reason, error = cancelled
            await self._note_end(replace(self.end, reason=reason, error=error))

    async def suspend(self) -> None:
        """Abort running episodes in good order, but write no end: the collection can continue later."""
        tasks = [entry.task for entry in self._running.values()]
        for entry in self._running.values():
            if not entry.delivering:
                entry.abort()
        await asyncio.gather(*tasks, *([self._ending] if self._ending else []), return_exceptions=True)

    async def _run(self, episode: Attempt) -> None:
        key = episode.key
        began = time.monotonic()
        try:
            rollouts = await episode.run()
            self._running[key].delivering = True
            if episode.group_input is None:
                self._report_grade(rollouts[0])
                await self._deliver(key, rollouts)
            else:
                await self._hold(key, HeldEpisode(episode.group_input, [rollout.to_json() for rollout in rollouts]))
            await self._grade_if_whole(key)
        except EpisodeFailed as error:
            await self._fail(episode, error.reason, str(error), time.monotonic() - began)
        except BaseException as error:
            if self._running[key].ended_from_outside:
                raise
            logger.exception("%s failed in an unforeseen way", episode.rollout_id)
            await self._fail(episode, "environment_error", error_line(error), time.monotonic() - began)

    def _leave(self, key: EpisodeKey) -> None:
        """Remove an episode whose asyncio task is over, for any reason, and make room for another."""
        del self._running[key]
        self._settle()
        self.on_change()
        if self.idle:
            self.on_idle()

    def _report_grade(self, rollout: Rollout) -> None:
        """Log and count a broken environment, or a state that could not be graded."""
        key = f"{rollout.task_id}, rollout {rollout.index}"
        if rollout.broke is not None:
            logger.warning("%s: its environment broke in %s: %s", key, rollout.broke["where"], rollout.broke["what"])
            self.services.metrics.count("broken_episodes")
        if rollout.ungradable is not None:
            logger.warning("%s counts as reward 0: its state was not gradable: %s", key, rollout.ungradable)
            self.services.metrics.count("ungradable_episodes")

    async def _hold(self, key: EpisodeKey, episode: HeldEpisode) -> None:
        """Store an episode that waits for its group on disk, and count it as finished: only the grade is missing."""
        line = episode.line(key)
        async with self._write_lock:
            try:
                await beside(self.stored.hold, [line])
            except OSError as error:
                self.unheld.append(line)
                return self._disk_failed(error)
        self.stored.held[key.task_id, key.index] = episode
        self.collector.finished(key)

    async def _grade_if_whole(self, key: EpisodeKey) -> None:
        """Grade a rollout's group if all its rollouts are finished or gone; :meth:`_grade_rest` grades other groups."""
        if self.stored.held and self.collector.is_whole(key) and self.collector.outcome in (None, *GRADED_ENDS):
            try:
                await self._grade_group(key.task_id, self.collector.group(key))
            except OSError as error:
                self._disk_failed(error)

    async def _grade_group(self, task_id: str, indices: Sequence[int]) -> None:
        """Grade and deliver the finished episodes of a group. Raises OSError if the disk refuses them."""
        every = {index: self.stored.held.get((task_id, index)) for index in indices}
        held = {index: episode for index, episode in every.items() if episode is not None}
        waiting = [index for index, episode in held.items() if episode.lines]
        if not waiting or (task_id, indices[0]) in self._grading:
            return
        self._grading.add((task_id, indices[0]))
        try:
            if any((task_id, index) not in self.stored.graded for index in waiting):
                grades = await grade_group(self.services.pool, task_id, [each.group_input for each in held.values()])
                graded = zip(held, grades, strict=True)
                new = {index: grade for index, grade in graded if (task_id, index) not in self.stored.graded}
                await beside(self.stored.note_grades, task_id, new)
            episodes = [
                [regraded(line, self.stored.graded[task_id, index]) for line in held[index].lines] for index in waiting
            ]
            async with self._write_lock:
                await beside(self.stored.rollouts.append, [rollout.to_json() for each in episodes for rollout in each])
            for index, rollouts in zip(waiting, episodes, strict=True):
                held[index].lines.clear()
                self._report_grade(rollouts[0])
                self.services.metrics.count("episodes", "finished")
            self._notify()
        finally:
            self._grading.discard((task_id, indices[0]))

    async def _deliver(self, key: EpisodeKey, rollouts: list[Rollout]) -> None:
        """Store an episode's sequences on disk (with other episodes that finish meanwhile), then count the episode."""
        self._pending.append((key, [rollout.to_json() for rollout in rollouts]))
        async with self._write_lock:
            batch, self._pending = self._pending, []
            if not batch:
                return
            lines = [line for _, sequences in batch for line in sequences]
            try:
                await beside(self.stored.rollouts.append, lines)
            except OSError as error:
                self.unwritten += lines
                return self._disk_failed(error)
            for finished, _ in batch:
                self.collector.finished(finished)
                self.services.metrics.count("episodes", "finished")
            self._notify()

    async def _fail(self, episode: Attempt, reason: str, message: str, seconds: float) -> None:
        key = episode.key
        if key not in self.collector.running:  # dropped while it failed
            return
        message = sanitize(message, MAX_ERROR_CHARACTERS)
        logger.warning("%s: %s: %s", episode.rollout_id, reason, message)
        self._running[key].delivering = True
        self.services.metrics.count("episodes", "failed")
        self.services.metrics.count("episode_failures", reason)
        final, tokens = self.collector.failed(key, reason, message), episode.sampled_tokens
        failure = Failure(self.request.id, key.task_id, key.index, key.attempt, reason, message, seconds, tokens, final)
        try:
            await beside(self.stored.meta.append, [json.dumps({"failure": asdict(failure)})])
        except OSError as error:
            self._disk_failed(error)
        if final:
            await self._grade_if_whole(key)

    def _disk_failed(self, error: OSError) -> None:
        self.collector.stop("failed", self._disk_line(error))

    def _disk_line(self, error: OSError) -> str:
        path = self.stored.rollouts.path
        cure = "free some space and ask for the collection again: nothing that was finished is lost"
        return f"cannot write {path}: {error.strerror or error}; {cure}"

    def _settle(self) -> None:
        """Abort the other episodes once the outcome is known. Store the end when nothing is being written."""
        if self.collector.outcome is None or self._ending is not None:
            return
        for key, entry in self._running.items():
            if not entry.delivering and key in self.collector.running:
                self.collector.drop(key)
                self.dropped_tokens += entry.episode.sampled_tokens
                self.dropped_seconds.append(time.monotonic() - entry.since)
                self.services.metrics.count("episodes", "dropped")
                self.services.metrics.count("dropped_tokens", by=entry.episode.sampled_tokens)
                entry.abort()
        if not any(entry.delivering for entry in self._running.values()):
            self._ending = asyncio.create_task(self._finish(), name=f"end of {self.request.id}")

    async def _finish(self) -> None:
        assert self.collector.outcome is not None, "asked for once it is known"
        outcome, why = self.collector.outcome, self.collector.error
        if outcome in GRADED_ENDS:
            try:
                await self._grade_rest()
            except Exception as error:  # else the collection would never end
                logger.exception("collection %s: its groups were not graded", self.request.id)
                outcome, why = "failed", self._disk_line(error) if isinstance(error, OSError) else error_line(error)
        end = CollectionEnd(
            reason=outcome,
            finished=self.collector.progress().finished,
            dropped=self.collector.dropped,
            dropped_tokens=self.dropped_tokens,
            failures=dict(self.collector.failures),
            seconds=time.monotonic() - self._started,
            error=why,
            failures_by_task=self.collector.failures_by_task,
            refused=self.collector.refused,
            lost=list(self.collector.lost),
            dropped_seconds=self.dropped_seconds,
        )
        if warning := failures_warning(end.finished, end.failures, end.failures_by_task):
            logger.warning("collection %s: %s", self.request.id, warning)
        await self._note_end(end)
        if outcome in GRADED_ENDS and self.stored.held and not end.lost:
            await beside(self.stored.drop_held)
        logger.info("collection %s ended: %s", self.request.id, end)
        self._notify()
        self.on_change()
        if self.idle:
            self.on_idle()

    async def _grade_rest(self) -> None:
        """Grade the groups that are not whole but large enough for the collection."""
        groups = {(item.task_id, tuple(item.indices)) for item in self.request.items()} if self.stored.held else ()
        await asyncio.gather(*(self._grade_group(*group) for group in sorted(groups)))

    async def _note_end(self, end: CollectionEnd) -> None:
        try:
            await beside(self.stored.meta.append, [json.dumps({"end": asdict(end)})])
        except OSError as error:
            logger.error("the end of collection %s is not on disk: %s", self.request.id, error)
        self.end = end

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
