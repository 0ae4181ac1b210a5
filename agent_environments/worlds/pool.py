"""A pool of episodes in workers under another interpreter (``make environments``)."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from agent_environments.protocol import EnvironmentCrashed, PoolStatus, TokenSpans, UnknownTask
from agent_environments.worlds.episode import EpisodeRules, WorldEnvironment
from agent_environments.worlds.worker_process import RequestFailed, WorkerGone, WorkerLost, WorkerProcess, WorkerStuck

logger = logging.getLogger(__name__)

WORKERS_FOLDER = Path(__file__).with_name("workers")
EXPERT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class WorldKind:
    """What a world's worker needs.

    Args:
        name: the dataset's name, printed with every score.
        worker: the program, a file in ``workers/``.
        episodes_per_worker: how many one process may play at once; 1 where each has a JVM.
        memory_mb: what a worker may allocate (RLIMIT_DATA, which its children inherit).
        heap_mb: ``-Xmx`` of the JVM that the worker starts; None: it starts none.
    """

    name: str
    worker: Path
    episodes_per_worker: int = 64
    memory_mb: int = 2048
    heap_mb: int | None = None

    def environment(self) -> dict[str, str]:
        """What the worker's process environment holds besides the usual."""
        if self.heap_mb is None:
            return {}
        return {"JAVA_TOOL_OPTIONS": f"-Xmx{self.heap_mb}m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"}


class WorldPool:
    """Lends episodes of the world that a subclass names as ``kind``, first come, first served.

    Args:
        token_spans: the policy's tokenizer, for cutting observations.
        python: interpreter of the worlds' environment.
        max_worlds: episodes at a time; None: as many as one worker plays, or eight where a worker plays one.
        observation_max_tokens: an observation is cut to this many tokens.
        step_timeout_s: time for one command, and for a grade.
        start_timeout_s: time for a worker, and for a task in it, to start.
    """

    kind: ClassVar[WorldKind]

    def __init__(
        self,
        token_spans: TokenSpans,
        python: str,
        max_worlds: int | None = None,
        observation_max_tokens: int = 1000,
        step_timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        per_worker = self.kind.episodes_per_worker
        places = max_worlds if max_worlds is not None else max(per_worker, 8)
        if places < 1 or observation_max_tokens < 1 or min(step_timeout_s, start_timeout_s) <= 0:
            raise ValueError("max_worlds and observation_max_tokens must be at least 1, time-outs above 0")
        self.dataset = self.kind.name
        self.rules = EpisodeRules(token_spans, observation_max_tokens, float(step_timeout_s), float(start_timeout_s))
        self.replays = 0
        self._python = python
        self._places = asyncio.Semaphore(places)  # wakes its waiters first come, first served
        self._splits: Mapping[str, list[str]] = {}
        self._known: frozenset[str] = frozenset()
        self._workers: dict[WorkerProcess, int] = {}
        """Workers that are up, and how many episodes each of them plays."""
        self._starting = asyncio.Lock()
        self._waiting = 0
        self._open: set[WorldEnvironment] = set()
        self._restarts = 0
        self._closing = False

    async def open(self) -> None:
        """Start a worker and ask it for its tasks.

        Raises:
            FileNotFoundError: no interpreter there, or no Java.
            EnvironmentCrashed: the worker does not work; says what it said.
        """
        if not os.access(self._python, os.X_OK):
            raise FileNotFoundError(
                f"no interpreter of the worlds at {self._python}: run `make environments`, or set `python`"
            )
        if self.kind.heap_mb is not None and shutil.which("java") is None:
            raise FileNotFoundError(
                f"{self.kind.name} needs Java: install it (Debian: apt-get install default-jre-headless)"
            )
        try:
            answer = await (await self._start_worker()).call(self.rules.start_timeout_s, "tasks")
        except (WorkerGone, WorkerLost, WorkerStuck, RequestFailed) as error:
            await self.close()
            raise EnvironmentCrashed(
                f"the worker of {self.kind.name} does not start under {self._python}: {error}; run `make environments`"
            ) from error
        self._splits = answer["splits"]
        self._known = frozenset(task for tasks in self._splits.values() for task in tasks)

    async def _start_worker(self) -> WorkerProcess:
        command: list[str | Path] = [self._python, self.kind.worker, str(self.kind.memory_mb)]
        worker = await WorkerProcess.start(command, self.kind.environment())
        self._workers[worker] = 0
        return worker

    async def lease(self) -> WorkerProcess:
        """The least busy worker with room for one more episode, or a new one."""
        async with self._starting:
            await self._bury()
            if self._closing:
                raise EnvironmentCrashed("the pool is closed")
            free = [worker for worker, playing in self._workers.items() if playing < self.kind.episodes_per_worker]
            worker = min(free, key=self._workers.__getitem__, default=None) or await self._start_worker()
            self._workers[worker] += 1
            return worker

    async def _bury(self) -> None:
        """Forget the workers that have ended."""
        for worker in [worker for worker in self._workers if not worker.alive]:
            del self._workers[worker]
            self._restarts += 1
            await worker.stop()

    def give_back(self, worker: WorkerProcess) -> None:
        """An episode has left this worker."""
        if worker in self._workers:
            self._workers[worker] -= 1

    async def expert(self, task_id: str) -> list[str]:
        """Commands that solve the task, as far as the world's own expert can.

        Raises:
            UnknownTask: as :meth:`check_tasks`.
            EnvironmentCrashed: the expert, or its worker, broke.
        """
        self.check_tasks([task_id])
        worker = await self.lease()
        try:
            return list((await worker.call(EXPERT_TIMEOUT_S, "expert", task=task_id))["commands"])
        except (WorkerGone, WorkerLost, WorkerStuck, RequestFailed) as error:
            raise EnvironmentCrashed(f"no expert play of {task_id}: {error}") from error
        finally:
            self.give_back(worker)

    def tasks(self, split: str) -> list[str]:
        if split not in self._splits:
            raise UnknownTask(f"no split {split!r} in dataset {self.dataset}; there are {', '.join(self._splits)}")
        return list(self._splits[split])

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            if task_id not in self._known:
                raise UnknownTask(f"no task {task_id!r} in dataset {self.dataset}")

    async def acquire(self, episode_id: str) -> WorldEnvironment:
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        if self._closing:
            self._places.release()
            raise EnvironmentCrashed("the pool is closed")
        environment = WorldEnvironment(self)
        self._open.add(environment)
        return environment

    def release(self, environment: WorldEnvironment) -> None:
        """Called once by an environment that closes."""
        self._open.discard(environment)
        self._places.release()

    def status(self) -> PoolStatus:
        """Counters for the node's metrics page."""
        details = {"replays": self.replays, "workers": len(self._workers)}
        return PoolStatus(len(self._open), self._waiting, self._restarts, details)

    async def close(self) -> None:
        """End all episodes and workers. May be called twice."""
        self._closing = True
        await asyncio.gather(*(worker.stop() for worker in list(self._workers)))
        self._workers.clear()
        for environment in list(self._open):
            await environment.close()
