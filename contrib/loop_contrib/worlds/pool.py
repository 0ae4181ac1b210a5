"""A pool of worlds under another interpreter (``make environments``), each episode's in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agent_environments.description import Description
from agent_environments.lost_worlds import Loss, WorldLost
from agent_environments.protocol import EnvironmentCrashed, Message, TokenSpans
from agent_environments.remote.episode import RemotePool
from agent_environments.remote.line import LineStuck, RequestFailed, WorldLine
from loop_contrib.worlds.world_process import WorldProcess
from loop_plumbing.breakage import raised_as
from loop_plumbing.forked_process import ForkServer, scrubbed_environment
from loop_plumbing.sanitize import printable

logger = logging.getLogger(__name__)

WORKERS_FOLDER = Path(__file__).with_name("workers")
EXPERT_TIMEOUT_S = 300.0
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
COMMAND_FORMAT = "Think first if you like. End your message with one command, on a line that begins with `Action: `."
_MARKED = re.compile(r"^[ \t]*action:[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class WorldKind:
    """The needs of the worker program of a kind of world.

    Args:
        name: the dataset's name, printed with every score.
        worker: the worker program, a file in ``workers/``.
        memory_mb: memory that a process may allocate (RLIMIT_DATA, which its children inherit).
        heap_mb: ``-Xmx`` of the JVM that each world starts; None if worlds start no JVM.
        cure: advice for the case that the interpreter is missing or lacks the world's package.
    """

    name: str
    worker: Path
    memory_mb: int = 2048
    heap_mb: int | None = None
    cure: str = "run `make environments`"

    def environment(self) -> dict[str, str]:
        """Return additional environment variables of the worker: the place of Java, if the world needs it."""
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
        token_spans: the policy's tokenizer, which cuts observations.
        python: interpreter of the worlds' environment.
        max_worlds: most episodes at a time; None is 64, or eight if each has a JVM.
        observation_max_tokens: the answer to a command is cut to this many tokens.
        step_timeout_s: time for one command, and for a grade.
        start_timeout_s: a starting world or task that uses no processor for this time counts as hanging. Also the
            time for a lost world to come back.
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
        places = max_worlds if max_worlds is not None else 64 if self.kind.heap_mb is None else 8
        super().__init__(self.kind.name, token_spans, places, observation_max_tokens, step_timeout_s, start_timeout_s)
        self._python = python
        self._server: ForkServer | None = None
        self._worlds: set[WorldProcess] = set()
        self._idle: list[WorldProcess] = []
        """Idle worlds with a JVM, which takes longer to start than an episode: it plays the next one."""

    async def open(self) -> None:
        """Start a world and ask it for its tasks.

        Raises:
            FileNotFoundError: the interpreter or Java is missing.
            EnvironmentCrashed: the world does not work; the message is the world's own.
        """
        if not os.access(self._python, os.X_OK):
            raise FileNotFoundError(
                f"no interpreter of the worlds at {self._python}: {self.kind.cure}, or set `python`"
            )
        if self.kind.heap_mb is not None and shutil.which("java") is None:
            raise FileNotFoundError(
                f"{self.kind.name} needs Java: install it (Debian: apt-get install default-jre-headless)"
            )
        command = [self._python, str(self.kind.worker), str(self.kind.memory_mb), *self.arguments]
        environment = scrubbed_environment(**{"HOME": "/nonexistent", "PATH": SYSTEM_PATH, **self.kind.environment()})
        self._server = ForkServer(self.kind.name, command, {}, EnvironmentCrashed, environment, Path(os.devnull))
        try:
            world = await self.lease()
            answer = await world.call(self.start_timeout_s, "tasks")
            await self.give_back(world)
        except (WorldLost, LineStuck, RequestFailed) as error:
            await self.close()
            lacks = "No module named" in str(error) or "ImportError" in str(error)
            cure = f"; {self.kind.cure}" if lacks else ""
            raise EnvironmentCrashed(
                f"the worker of {self.kind.name} does not start under {self._python}: {error}{cure}"
            ) from error
        for note in answer["notes"]:
            logger.warning("%s: %s", self.dataset, note)
        self._learn(answer)

    def _learn(self, answer: dict[str, Any]) -> None:
        """Store what the answer to the request "tasks" says."""
        self._know(answer["splits"])

    async def lease(self) -> WorldProcess:
        """Return a world for one episode alone: an idle one, or else a new one."""
        if self._closing or self._server is None:
            raise EnvironmentCrashed("the pool is closed")
        while self._idle:
            if (world := self._idle.pop()).alive:
                return world
            await self.give_back(world)
        try:
            world = WorldProcess(await self._server.fork(), self.losses)
        except (EnvironmentCrashed, OSError) as error:  # no memory for it, or no room
            raise WorldLost(str(error), Loss.REFUSED) from error
        self._worlds.add(world)
        return world

    async def give_back(self, line: WorldLine) -> None:
        if not isinstance(line, WorldProcess) or line not in self._worlds:
            return
        if line.alive and self.kind.heap_mb is not None and not line.busy and not self._closing:
            self._idle.append(line)
            return
        self._restarts += not line.alive
        self._worlds.remove(line)
        await line.hang_up()

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        system = Message("system", f"{answer['instructions']}\n\n{COMMAND_FORMAT}")
        return [system, Message("user", printable(answer["observation"]))]  # it is the task, and never cut

    def command(self, message: str) -> str | None:
        """Return the text after the last ``Action:`` that starts a line, else the last line with text, else None."""
        lines = _MARKED.findall(message) or [line for line in message.splitlines() if line.strip()] or [""]
        return lines[-1].strip() or None

    def message(self, command: str) -> str:
        """Return an assistant message that gives ``command`` and nothing else."""
        return f"Action: {command}"

    async def _close_lines(self) -> None:
        await asyncio.gather(*(world.hang_up() for world in self._worlds))
        self._worlds.clear()
        if self._server is not None:
            await self._server.close()

    async def expert(self, task_id: str) -> list[str]:
        """Return commands that solve the task, as far as the world's own expert can.

        Raises:
            UnknownTask: as :meth:`check_tasks`.
            EnvironmentCrashed: the expert or its world failed.
        """
        self.check_tasks([task_id])
        with raised_as(EnvironmentCrashed, f"no expert play of {task_id}: ", WorldLost, LineStuck, RequestFailed):
            world = await self.lease()
            try:
                return list((await world.call(EXPERT_TIMEOUT_S, "expert", task=task_id))["commands"])
            finally:
                await self.give_back(world)
