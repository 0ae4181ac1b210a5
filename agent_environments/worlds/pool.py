"""A pool of episodes in workers under another interpreter (``make environments``)."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agent_environments.description import Description
from agent_environments.losses import Loss, WorldLost
from agent_environments.observation import printable
from agent_environments.protocol import EnvironmentCrashed, Message, TokenSpans
from agent_environments.remote.line import Line, LineStuck, RequestFailed
from agent_environments.remote.pool import RemotePool
from agent_environments.worlds.commands import COMMAND_FORMAT, command_of, message_of
from agent_environments.worlds.worker_process import SYSTEM_PATH, WorkerProcess

logger = logging.getLogger(__name__)

WORKERS_FOLDER = Path(__file__).with_name("workers")
EXPERT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class WorldKind:
    """The needs of a world's worker.

    Args:
        name: the dataset's name, printed with every score.
        worker: the program, a file in ``workers/``.
        episodes_per_worker: how many one process may play at once; 1 where each has a JVM.
        memory_mb: what a worker may allocate (RLIMIT_DATA, which its children inherit).
        heap_mb: ``-Xmx`` of the JVM that the worker starts; None: it starts none.
        package: what a user installs into an interpreter for it; None: ``make environments`` does.
    """

    name: str
    worker: Path
    episodes_per_worker: int = 64
    memory_mb: int = 2048
    heap_mb: int | None = None
    package: str | None = None

    @property
    def cure(self) -> str:
        """The help for an interpreter that is not there, or lacks the package."""
        return f"install {self.package} there" if self.package else "run `make environments`"

    def environment(self) -> dict[str, str]:
        """Return the additions to the worker's process environment: where Java is, which may be anywhere."""
        if self.heap_mb is None:
            return {}
        java = os.path.dirname(os.path.abspath(shutil.which("java") or "/usr/bin/java"))
        return {
            "PATH": f"{java}:{SYSTEM_PATH}",
            "JAVA_TOOL_OPTIONS": f"-Xmx{self.heap_mb}m -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        }


class WorldPool(RemotePool):
    """Lends episodes of the world that a subclass names as ``kind``, first come, first served.

    Args:
        token_spans: the policy's tokenizer, for cutting observations.
        python: interpreter of the worlds' environment.
        max_worlds: episodes at a time; None: as many as one worker plays, or eight where a worker plays one.
        observation_max_tokens: what answers a command is cut to this many tokens.
        step_timeout_s: time for one command, and for a grade.
        start_timeout_s: a worker, or a task in it, that starts and uses no processor for so long hangs; and time for a
            lost world to come back.
    """

    kind: ClassVar[WorldKind]
    arguments: tuple[str, ...] = ()
    """Further arguments of the worker."""
    description = Description()

    def __init__(
        self,
        token_spans: TokenSpans,
        python: str,
        max_worlds: int | None = None,
        observation_max_tokens: int = 1000,
        step_timeout_s: float = 180.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        places = max_worlds if max_worlds is not None else max(self.kind.episodes_per_worker, 8)
        super().__init__(self.kind.name, token_spans, places, observation_max_tokens, step_timeout_s, start_timeout_s)
        self._python = python
        self._workers: set[WorkerProcess] = set()
        self._playing: Counter[Line] = Counter()
        """How many episodes each of them plays."""
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Start a worker and ask it for its tasks.

        Raises:
            FileNotFoundError: no interpreter there, or no Java.
            EnvironmentCrashed: the worker does not work; says what it said.
        """
        if not os.access(self._python, os.X_OK):
            raise FileNotFoundError(
                f"no interpreter of the worlds at {self._python}: {self.kind.cure}, or set `python`"
            )
        if self.kind.heap_mb is not None and shutil.which("java") is None:
            raise FileNotFoundError(
                f"{self.kind.name} needs Java: install it (Debian: apt-get install default-jre-headless)"
            )
        try:
            answer = await (await self._start_worker()).call(self.rules.start_timeout_s, "tasks")
        except (WorldLost, LineStuck, RequestFailed) as error:
            await self.close()
            raise EnvironmentCrashed(
                f"the worker of {self.kind.name} does not start under {self._python}: {error}; {self.kind.cure}"
            ) from error
        self._learn(answer)

    def _learn(self, answer: dict[str, Any]) -> None:
        """Take in the answer to "tasks"."""
        self._know(answer["splits"])

    async def _start_worker(self) -> WorkerProcess:
        command: list[str | Path] = [self._python, self.kind.worker, str(self.kind.memory_mb), *self.arguments]
        try:
            worker = await WorkerProcess.start(command, self.kind.environment(), self.losses)
        except OSError as error:  # no memory for it, or no room
            raise WorldLost(f"no worker can be started: {error}", Loss.REFUSED) from error
        self._workers.add(worker)
        return worker

    async def lease(self) -> WorkerProcess:
        """The least busy worker with room for one more episode, or a new one."""
        async with self._starting:
            await self._bury()
            if self._closing:
                raise EnvironmentCrashed("the pool is closed")
            free = [worker for worker in self._workers if self._playing[worker] < self.kind.episodes_per_worker]
            worker = min(free, key=self._playing.__getitem__, default=None) or await self._start_worker()
            self._playing[worker] += 1
            return worker

    async def _bury(self) -> None:
        """Forget the workers that have ended."""
        for worker in [worker for worker in self._workers if not worker.alive]:
            self._workers.remove(worker)
            self._playing.pop(worker, None)
            self._restarts += 1
            await worker.stop()

    async def give_back(self, line: Line) -> None:
        if line in self._playing:
            self._playing[line] -= 1

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        system = Message("system", f"{answer['instructions']}\n\n{COMMAND_FORMAT}")
        return [system, Message("user", printable(answer["observation"]))]  # it is the task, and never cut

    def command(self, message: str) -> str | None:
        return command_of(message) or None

    def message(self, command: str) -> str:
        """An assistant message that gives ``command`` and nothing else."""
        return message_of(command)

    def _details(self) -> dict[str, Any]:
        return {**super()._details(), "workers": len(self._workers)}

    async def _close_lines(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._workers.clear()

    async def expert(self, task_id: str) -> list[str]:
        """Commands that solve the task, as far as the world's own expert can.

        Raises:
            UnknownTask: as :meth:`check_tasks`.
            EnvironmentCrashed: the expert, or its worker, broke.
        """
        self.check_tasks([task_id])
        try:
            worker = await self.lease()
            try:
                return list((await worker.call(EXPERT_TIMEOUT_S, "expert", task=task_id))["commands"])
            finally:
                await self.give_back(worker)
        except (WorldLost, LineStuck, RequestFailed) as error:
            raise EnvironmentCrashed(f"no expert play of {task_id}: {error}") from error
