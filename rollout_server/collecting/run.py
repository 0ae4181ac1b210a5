"""A collection that is being worked on, and its two files.

``<id>.jsonl`` holds one rollout per line. ``<id>.meta.jsonl`` holds, one object per line: ``{"request": ...}`` first,
``{"opened": n}`` each time work began, ``{"failure": ...}`` per failed attempt, ``{"end": ...}`` when work ended. A
collection whose last opening has no end was interrupted, and is taken up again from what is in the files: what it had
lost stays lost. One that is taken up again after its end attempts the lost ones anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from loop_formats.branch import BranchStart
from loop_formats.collection_request import CollectionEnd, CollectionRequest, failures_warning
from loop_formats.rollout import BRANCH_DIFFERS, Failure, Rollout
from loop_formats.run_files import log_path, meta_path
from loop_plumbing.breakage import MOST_CHARACTERS, error_line
from loop_plumbing.visible import visible
from rollout_server.collecting.attempt import Attempt
from rollout_server.collecting.collector import Collector, EpisodeKey, Gone
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.collecting.rollout_log import AppendLog, beside
from rollout_server.collecting.speaker import EpisodeFailed

logger = logging.getLogger(__name__)


NewAttempt = Callable[[EpisodeKey, int, CollectionRequest, str | None, BranchStart | None], Attempt]
"""Builds an attempt from its key, its draw, the request, the model's name (None in mode "latest"), and the point of a
stored rollout that it goes on from."""


class StoredCollection:
    """The files of one collection, read and recovered."""

    def __init__(self, folder: Path, collection_id: str):
        self.request: dict[str, Any] | None = None
        self.opened = 0
        self.end: CollectionEnd | None = None
        self.done: set[tuple[str, int]] = set()
        self.gone: dict[EpisodeKey, Gone] = {}
        self._expected: tuple[str, int] | None = None
        self.meta = AppendLog(meta_path(folder, collection_id), self._visit_meta)
        self.rollouts = AppendLog(log_path(folder, collection_id), self._visit_rollout)

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
                    self.gone[key] = Gone(failure["reason"], failure["message"])
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

    def begin(self, request: CollectionRequest) -> None:
        """Note that work begins (again). Raises OSError when that cannot be written."""
        known = self.request is not None and self.request.get("max_lost") == request.max_lost
        lines = [] if known else [json.dumps({"request": request.to_dict()})]
        self.meta.append([*lines, json.dumps({"opened": self.opened + 1, "at": time.time()})])
        self.request = request.to_dict()
        self._note_opening(self.opened + 1)

    def _note_opening(self, count: int) -> None:
        if self.end is not None:  # whoever asked again has mended what was wrong
            self.gone = {key: gone for key, gone in self.gone.items() if gone.refused}
        self.opened, self.end = count, None


@dataclass
class _Running:
    episode: Attempt
    task: asyncio.Task[None]
    delivering: bool = False
    aborted: bool = False
    """Whether it was this collection that cancelled its task."""

    def abort(self) -> None:
        self.aborted = True
        self.task.cancel()

    @property
    def ended_from_outside(self) -> bool:
        """Whether what its task raises now is the end that this collection gave it, or the end of the event loop.

        Not whether the task is being cancelled, or GeneratorExit is raised: whatever it ran can have asked for that.
        """
        try:
            return self.aborted or asyncio.current_task() is not self.task
        except RuntimeError:  # no loop: its coroutine is being closed
            return True


@dataclass
class CollectionRun:
    """Runs the episodes of one collection; the node decides when a slot is free and calls :meth:`launch`.

    ``on_change`` is called whenever an episode has left (a slot is free) and when the collection has ended;
    ``on_idle`` once it has ended and its last episode has closed its world.
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
    unwritten: list[str] = field(default_factory=list)
    """Finished rollouts that the disk would not take; written when the collection is asked for again."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new one, at every change that a reader cares for."""

    def __post_init__(self) -> None:
        self.collector = Collector(self.request, self.stored.done, self.stored.opened - 1, self.stored.gone)
        self._running: dict[EpisodeKey, _Running] = {}
        self._pending: list[tuple[EpisodeKey, list[str]]] = []
        self._write_lock = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._started = time.monotonic()
        if self.end is None:
            self._settle()
        else:
            self.collector.stop(self.end.reason, self.end.error)

    @property
    def state(self) -> str:
        """ "running", or how it ended."""
        return "running" if self.end is None else self.end.reason

    @property
    def episodes_running(self) -> int:
        """Slots in use, those of aborted episodes that are still closing their worlds included."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """It has ended and none of its episodes is left."""
        return self.end is not None and not self._running

    def launch(self, key: EpisodeKey) -> None:
        """Start the episode that the collector named."""
        draw, start = self.collector.draw(key), self.collector.start_of(key)
        episode = self.new_attempt(key, draw, self.request, self.pinned_model, start)
        task = asyncio.create_task(self._run(episode), name=episode.rollout_id)
        self._running[key] = _Running(episode, task)
        # Not a finally of _run, whose body is never entered where the task is cancelled before its first step.
        task.add_done_callback(lambda _: self._leave(key))

    async def cancel(self) -> None:
        """Stop; what runs is dropped, what is finished stays. What an ended one has lost is attempted anew when it is
        asked for again."""
        cancelled = "cancelled", "the collection was cancelled"
        self.collector.stop(*cancelled)
        self._settle()
        if self.end is not None and self.end.lost:
            reason, error = cancelled
            await self._note_end(replace(self.end, reason=reason, error=error))

    async def suspend(self) -> None:
        """Abort what runs, as a crash would, but tidily: no end is written, so the collection can be taken up again."""
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
            ungradable, broke = rollouts[0].ungradable, rollouts[0].broke
            if broke is not None:
                logger.warning("%s: its environment broke in %s: %s", key, broke["where"], broke["what"])
                self.services.metrics.broken()
            if ungradable is not None:
                logger.warning("%s counts as reward 0: its state was not gradable: %s", key, ungradable)
                self.services.metrics.ungradable()
            await self._deliver(key, rollouts)
        except EpisodeFailed as error:
            await self._fail(episode, error.reason, str(error), time.monotonic() - began)
        except BaseException as error:
            if self._running[key].ended_from_outside:
                raise
            logger.exception("%s failed in an unforeseen way", episode.rollout_id)
            await self._fail(episode, "environment_error", error_line(error), time.monotonic() - began)

    def _leave(self, key: EpisodeKey) -> None:
        """The episode's task is over, however: its slot is free."""
        del self._running[key]
        self._settle()
        self.on_change()
        if self.idle:
            self.on_idle()

    async def _deliver(self, key: EpisodeKey, rollouts: list[Rollout]) -> None:
        """Put an episode's sequences on disk, together with others that finish meanwhile, and only then count it."""
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
                self._disk_failed(error)
                return
            for finished, _ in batch:
                self.collector.finished(finished)
                self.services.metrics.finished()
            self._notify()

    async def _fail(self, episode: Attempt, reason: str, message: str, seconds: float) -> None:
        key = episode.key
        if key not in self.collector.running:  # dropped while it failed
            return
        message = visible(message, MOST_CHARACTERS)
        logger.warning("%s: %s: %s", episode.rollout_id, reason, message)
        self._running[key].delivering = True
        self.services.metrics.failed(reason)
        final, tokens = self.collector.failed(key, reason, message), episode.sampled_tokens
        failure = Failure(self.request.id, key.task_id, key.index, key.attempt, reason, message, seconds, tokens, final)
        try:
            await beside(self.stored.meta.append, [json.dumps({"failure": asdict(failure)})])
        except OSError as error:
            self._disk_failed(error)

    def _disk_failed(self, error: OSError) -> None:
        path = self.stored.rollouts.path
        cure = "free some space and ask for the collection again: nothing that was finished is lost"
        self.collector.stop("failed", f"cannot write {path}: {error.strerror or error}; {cure}")

    def _settle(self) -> None:
        """Once the outcome is known: abort the rest at once, and when nothing is being written, note the end."""
        if self.collector.outcome is None or self._ending is not None:
            return
        for key, entry in self._running.items():
            if not entry.delivering and key in self.collector.running:
                self.collector.drop(key)
                self.dropped_tokens += entry.episode.sampled_tokens
                self.services.metrics.dropped(entry.episode.sampled_tokens)
                entry.abort()
        if not any(entry.delivering for entry in self._running.values()):
            self._ending = asyncio.create_task(self._finish(), name=f"end of {self.request.id}")

    async def _finish(self) -> None:
        assert self.collector.outcome is not None, "asked for once it is known"
        end = CollectionEnd(
            reason=self.collector.outcome,
            finished=self.collector.progress().finished,
            dropped=self.collector.dropped,
            dropped_tokens=self.dropped_tokens,
            failures=dict(self.collector.failures),
            seconds=time.monotonic() - self._started,
            error=self.collector.error,
            failures_by_task=self.collector.failures_by_task,
            refused=self.collector.refused,
            lost=list(self.collector.lost),
        )
        if warning := failures_warning(end.finished, end.failures, end.failures_by_task):
            logger.warning("collection %s: %s", self.request.id, warning)
        await self._note_end(end)
        logger.info("collection %s ended: %s", self.request.id, end)
        self._notify()
        self.on_change()
        if self.idle:
            self.on_idle()

    async def _note_end(self, end: CollectionEnd) -> None:
        try:
            await beside(self.stored.meta.append, [json.dumps({"end": asdict(end)})])
        except OSError as error:
            logger.error("the end of collection %s is not on disk: %s", self.request.id, error)
        self.end = end

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
