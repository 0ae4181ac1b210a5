"""The pool's side of a fork server: start it, connect to it, have children killed, notice its death, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_environments.losses import Loss
from agent_environments.protocol import EnvironmentCrashed
from loop_plumbing.moving import Stalled, while_moving

WORKER_FOLDER = Path(__file__).resolve().parents[1] / "worker"
STOP_TIMEOUT_S = 30.0
DEATH_SHOWS_S = 5.0
"""How long after a child is gone its server is given to say how it ended, or to turn out dead itself."""
MAX_LINE = 64 * 1024 * 1024


@dataclass(frozen=True)
class ServerSpec:
    """The command that starts a fork server. ``prefix`` is put before the command (bubblewrap)."""

    role: str
    python: str
    folder: Path
    root: Path
    warm_up_task: str
    settings: Mapping[str, Any]
    prefix: Sequence[str] = ()

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.role}.sock"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.role}.log"


def _pipes(process: asyncio.subprocess.Process) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    """Its standard input and output."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process was started without pipes")
    return process.stdin, process.stdout


class ForkServer:
    """A running ``worker/fork_server.py``. ``ready`` is what it said of itself when it was warm."""

    def __init__(self, spec: ServerSpec, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self._spec = spec
        self._process = process
        self._stdin, self._stdout = _pipes(process)
        self.ready = ready
        self._children: dict[int, asyncio.Future[int]] = {}
        self._watcher = asyncio.create_task(self._drain_events())

    @classmethod
    async def start(cls, spec: ServerSpec) -> ForkServer:
        """Start and warm up, for as long as it moves; raises EnvironmentCrashed, in one line, if that fails."""
        arguments = {
            "role": spec.role,
            "socket": str(spec.socket),
            "warm_up_task": spec.warm_up_task,
            "settings": {**spec.settings, "root": str(spec.root)},
        }
        log = await asyncio.to_thread(open, spec.log, "ab")
        with log:
            process = await asyncio.create_subprocess_exec(
                *spec.prefix,
                spec.python,
                str(WORKER_FOLDER / "fork_server.py"),
                json.dumps(arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=scrubbed_environment(spec.root),
                cwd=spec.folder,
                start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
                limit=MAX_LINE,
            )
        try:
            line = await while_moving(_pipes(process)[1].readline(), process.pid)
            ready = json.loads(line)
        except BaseException as error:  # cancelled included: nobody else knows of the process yet
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if not isinstance(error, Stalled | ValueError):
                raise
            why = f"{error} while it started" if isinstance(error, Stalled) else "did not start"
            said = spec.log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
            raise EnvironmentCrashed(
                f"the {spec.role} server {why} ({spec.python}){': ' + said[-1] if said else ''}"
            ) from None
        return cls(spec, process, ready)

    async def _drain_events(self) -> None:
        while line := await self._stdout.readline():
            event = json.loads(line)
            if ended := self._children.pop(event["pid"], None):
                ended.set_result(event["status"])
        await self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def contained(self) -> bool:
        """Whether it was started inside bubblewrap."""
        return bool(self._spec.prefix)

    @property
    def alive(self) -> bool:
        return not self._watcher.done()

    async def connect(self) -> Connection:
        """A child of its own; raises EnvironmentCrashed if the server is gone, or hangs, in which case it is ended."""
        connection = None
        try:
            opening = asyncio.open_unix_connection(str(self._spec.socket), limit=MAX_LINE)
            reader, writer = await while_moving(opening, self.pid)
            connection = Connection(self, reader, writer)
            connection.pid = (await while_moving(connection.call(None), self.pid))["pid"]
            self._children[connection.pid] = connection.ended
        except BaseException as error:
            if connection is not None:
                connection.kill()
            if isinstance(error, Stalled):
                self.kill()
                raise EnvironmentCrashed(
                    f"the {self._spec.role} server gave no child: it {error}, and is ended"
                ) from error
            if isinstance(error, OSError):
                raise EnvironmentCrashed(f"the {self._spec.role} server is gone: {error}") from error
            raise
        return connection

    async def gives_children(self) -> bool:
        """Whether it lives. It looks for its own interpreter server's end before it forks, so however slow the machine
        is, one that gives a child had not lost that when it was asked.
        """
        try:
            child = await self.connect()
        except EnvironmentCrashed:
            return False
        child.kill()
        return True

    async def wait_end(self, seconds: float, child: asyncio.Future[int] | None = None) -> None:
        """Return when it, or the given child of it, has ended, or after ``seconds``."""
        waits: list[asyncio.Future[Any]] = [self._watcher] if child is None else [self._watcher, child]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def kill_child(self, pid: int) -> None:
        """Have the server send SIGKILL to the process group of its child ``pid``."""
        self._children.pop(pid, None)
        with contextlib.suppress(OSError, RuntimeError):
            self._stdin.write(json.dumps({"op": "kill", "pid": pid}).encode() + b"\n")

    def kill(self) -> None:
        """End it, and by that all its children, at once; for one that no longer answers."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """End it and all its children; by force if it does not end by itself."""
        with contextlib.suppress(OSError, RuntimeError):
            self._stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self._watcher


class Connection:
    """A conversation with one child of a fork server. Its first message is its pid; then one answer per request."""

    def __init__(self, server: ForkServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self._reader = reader
        self._writer = writer
        self.pid: int | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Wait status of the child, if it ended by itself and its server lived to see it."""

    async def call(self, request: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send ``request`` (None: nothing) and return the next message; EnvironmentCrashed if the child is gone."""
        try:
            if request is not None:
                self._writer.write(json.dumps(request).encode() + b"\n")
                await self._writer.drain()
            line = await self._reader.readline()
            if line.endswith(b"\n") and isinstance(message := json.loads(line), dict):
                return message
        except (OSError, ValueError, RecursionError) as error:
            raise EnvironmentCrashed(f"the connection to the process was lost: {error}") from error
        raise EnvironmentCrashed("the connection to the process was lost")

    async def how_it_ended(self) -> tuple[Loss, str]:
        """Of a child that is gone: by itself (``ENDED``), by a SIGKILL that somebody sent it (``KILLED``), or with its
        server (``REFUSED``).
        """
        await self.server.wait_end(DEATH_SHOWS_S, self.ended)
        if not self.ended.done():
            return (Loss.KILLED, "did not say how it ended") if self.server.alive else (Loss.REFUSED, "had no server")
        code = os.waitstatus_to_exitcode(self.ended.result())
        if code == -signal.SIGKILL:
            return Loss.KILLED, "was killed"
        return Loss.ENDED, f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"

    def kill(self) -> None:
        """Kill the child's process group and hang up."""
        if self.pid is not None:
            self.server.kill_child(self.pid)
        self._writer.close()


def scrubbed_environment(root: Path) -> dict[str, str]:
    """The whole environment of a server: nothing of the owner's, which may hold tokens, gets near agent code."""
    return {
        "APPWORLD_ROOT": str(root),
        "APPWORLD_CACHE": str(root / ".cache"),
        "HOME": str(root),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TZ": os.environ.get("TZ", "UTC"),
        "PYTHONHASHSEED": "0",  # sets iterate in the same order in every world, and in a replayed one
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
