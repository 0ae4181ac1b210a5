"""The owner's end of a fork server and of its processes (:mod:`loop_plumbing.fork_server`).

The server runs below :mod:`loop_plumbing.process_guard`: it ends with the owner, and with all that was started in
its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loop_plumbing.breakage import Raised
from loop_plumbing.fork_server import MAX_LINE, DeadlinePassed, WrongArguments
from loop_plumbing.moving import Stalled, while_moving
from loop_plumbing.running_server import STOP_S, RunningServer

KILL_AFTER_S = 10.0
"""How long after its deadline a call that cannot be interrupted ends with its process."""
KILLED = f"signal {signal.SIGKILL:d}"
DEATH_SHOWS_S = 30.0
"""How long after the end of its answers a process is given to have ended."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


def scrubbed_environment(**variables: str) -> dict[str, str]:
    """The whole environment of a server, ``variables`` among it: nothing of the owner's, which may hold tokens."""
    return {
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets iterate in the same order in every process, and in one that takes its place
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        **variables,
    }


class ProcessEnded(Exception):
    """The process ended in the middle of a call, and the server lives: the call was the cause.

    ``killed`` says that it got a SIGKILL, which was none of ours.
    """

    def __init__(self, how: str, killed: bool = False) -> None:
        super().__init__(how)
        self.killed = killed


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """A question that is cut off would leave its answer to the next one: it goes on when the caller is cancelled."""
    return await asyncio.shield(asyncio.ensure_future(work))


class ForkServer:
    """Starts with the first :meth:`fork`, and again with the next one where it has died.

    Args:
        name: of the server in messages.
        command: starts it; the number of its socket comes last.
        told: the first line of its standard input, as JSON.
        away: makes the exception, of a message, for a server that does not start or has ended, and for a process that
            says so of what it needs.
        environment: its variables; None: the owner's.
        log: the file to which what it and its processes print is appended; None: the owner's standard error.

    ``restarts`` counts how often another one took the place of one that had died.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        told: Mapping[str, Any],
        away: Callable[[str], Exception],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self.away = away
        self._command = command
        self._told = json.dumps(told).encode() + b"\n"
        self._environment = environment
        self._log = log
        self.restarts = 0
        self._running: RunningServer | None = None
        self._lock = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._running is not None and not self._running.over.done()

    @property
    def pid(self) -> int:
        """The process above the server and all that it forks; 0 where there is none."""
        return 0 if self._running is None else self._running.pid

    async def start(self) -> Mapping[str, Any]:
        """Have it run; returns what it said when it was ready.

        Raises:
            away: it does not start.
        """
        return (await self._server()).ready

    async def fork(self) -> ForkedProcess:
        """A new process.

        Raises:
            away: the server does not start, or there is no memory.
        """
        forking = asyncio.ensure_future(self._fork())
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_end_unwanted)
            raise

    async def _fork(self) -> ForkedProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                server = await self._server()
                answer = await server.ask({"fork": True}, theirs.fileno())
                if server.over.done():  # it died on the way
                    server = await self._server()
                    answer = await server.ask({"fork": True}, theirs.fileno())
            if "error" in answer:
                raise self.away(f"a {self.name} process cannot be started: {answer['error']}")
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        except BaseException:
            ours.close()
            raise
        return ForkedProcess(self, server, answer, reader, writer)

    async def close(self) -> None:
        """End the server and every process, also one that is about to start."""
        if self._running is not None:
            self._running.kill()
        async with self._lock:
            running, self._running = self._running, None
            if running is not None:
                await running.stop()

    async def _server(self) -> RunningServer:
        return await _to_its_end(self._found_or_started())

    async def _found_or_started(self) -> RunningServer:
        async with self._lock:
            if self._running is not None and not self._running.over.done():
                return self._running
            if self._running is not None:
                logger.warning("the %s server died; starting another", self.name)
                self.restarts += 1
                await self._running.stop()
            self._running = None
            running = self._running = await RunningServer.start(self._command, self._environment, self._log)
            try:
                said = await running.prepared(self._told)
            except Stalled as error:
                said = {"failed": f"it {error}"}
            except OSError:
                said = {}
            if "ready" not in said:
                self._running = None
                await running.stop()
                raise self.away(f"the {self.name} server does not start: {said.get('failed', running.last_words)}")
            running.ready = said["ready"]
            return running


def _end_unwanted(forking: asyncio.Task[ForkedProcess]) -> None:
    if not forking.cancelled() and forking.exception() is None:
        forking.result().kill()


class ForkedProcess:
    """A process that answers one request at a time. ``ready`` is what its server said when it was ready."""

    def __init__(
        self,
        server: ForkServer,
        running: RunningServer,
        forked: Mapping[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid: int = forked["pid"]
        self.ready = running.ready
        self._server = server
        self._running = running
        self.ended: asyncio.Future[int | None] = forked["ended"]
        """Its wait status; None where its server has ended before."""
        self.killed = False
        """Whether it was ended from here."""
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()
        self._until: asyncio.Timeout | None = None

    @property
    def alive(self) -> bool:
        """Whether it has neither ended nor been ended."""
        return not self.killed and not self.ended.done()

    async def ask(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        """Return the result of the operation ``op``, which must be over within ``deadline_s``.

        A call that is cancelled is interrupted; the next one waits until it is over.

        Raises:
            DeadlinePassed, Raised, WrongArguments: of the call. A call that could not be interrupted has ended with
                the process.
            ProcessEnded: the process ended.
            away: the server ended, or something else that the call needs is away.
        """
        answer = await self.answer_within({"op": op, **arguments}, deadline_s)
        if "crashed" in answer:
            raise self._server.away(answer["crashed"])
        if "late" in answer:
            raise DeadlinePassed(answer["late"])
        if "raised" in answer:
            raise Raised(answer["raised"], answer.get("place", ""))
        if "wrong" in answer:
            raise WrongArguments(answer["wrong"])
        return answer["result"]

    async def answer_within(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a request and return its answer, whatever that says. A call that is cancelled is interrupted.

        Raises:
            DeadlinePassed: it took longer and could not be interrupted; the process was ended.
            ProcessEnded: the process ended, or sent what is no answer and was ended.
            away: the server ended.
        """
        try:
            return await _to_its_end(self._in_time(request, deadline_s))
        except asyncio.CancelledError:
            self.interrupt()
            raise

    async def exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer, however long it takes.

        Raises:
            ProcessEnded: the process ended, or sent what is no answer and was ended.
            away: the server ended.
        """
        with contextlib.suppress(OSError):  # it has ended, which is seen where its answer is read
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
        return await self.answer()

    async def exchange_while_it_moves(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`exchange` for what may take the server's processes a while; where they stand still, all are ended.

        Raises:
            ProcessEnded, away: as there; away also where they stood still.
        """
        try:
            return await while_moving(self.exchange(request), self._running.pid)
        except Stalled as error:
            self._running.kill()
            raise self._server.away(f"the {self._server.name} server {error}, and is ended") from error

    async def answer(self) -> dict[str, Any]:
        """The next answer, of a request that nobody waits for any more; raises as :meth:`exchange`."""
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        except ValueError:  # longer than MAX_LINE
            line = b"\n"
        if line.endswith(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    return answer
            await self.end()
            raise ProcessEnded("its process sent what is no answer")
        await asyncio.wait([self.ended], timeout=DEATH_SHOWS_S)
        by_itself = self.ended.done() and not self.killed
        how = await self.end()
        raise ProcessEnded(f"its process ended with {how}", killed=by_itself and how == KILLED)

    async def has_server(self) -> bool:
        """Whether its server lives, and all that this needs; it looks before it answers, however slow the machine."""
        return "error" not in await self._running.ask({"here": True})

    @property
    def busy(self) -> bool:
        """Whether a call is being made, be it that nobody waits for it any more."""
        return self._lock.locked()

    async def idle(self) -> None:
        """Return once no call is being made."""
        async with self._lock:
            pass

    def interrupt(self) -> None:
        """End the call that is being made: at once if it lets itself be interrupted, soon with the process else."""
        if self.alive and self._until is not None:
            with contextlib.suppress(RuntimeError):  # it is over already: the process is being ended
                self._until.reschedule(asyncio.get_running_loop().time() + KILL_AFTER_S)
            self._running.send({"interrupt": self.pid})

    def kill(self) -> None:
        """End it and all that it started."""
        self.killed = True
        self._writer.close()
        self._running.send({"kill": self.pid})

    async def end(self) -> str:
        """End it and all that it started; says how it ended, which may have been before.

        Raises:
            away: the server has ended, and all its processes with it.
        """
        self.kill()
        await asyncio.wait([self.ended], timeout=STOP_S)
        status = self.ended.result() if self.ended.done() else None
        if status is None:
            self._running.kill()  # unless it has ended, it hangs
            raise self._server.away(f"the {self._server.name} server has ended")
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code}" if code < 0 else f"status {code}"

    async def _in_time(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        async with self._lock:
            if not self.alive:
                raise ProcessEnded("it had ended before")
            try:
                async with asyncio.timeout(deadline_s + KILL_AFTER_S) as self._until:
                    return await self.exchange(request)
            except TimeoutError as error:
                await self.end()
                raise DeadlinePassed(f"took longer than {deadline_s:g} s, and was ended") from error
            finally:
                self._until = None
