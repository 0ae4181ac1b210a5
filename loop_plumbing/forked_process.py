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
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loop_plumbing import process_guard, running_time
from loop_plumbing.breakage import Raised
from loop_plumbing.fork_server import MAX_LINE, MAX_MESSAGE, DeadlinePassed, WrongArguments
from loop_plumbing.moving import Stalled, while_moving

PREPARE_S = 600.0
"""Seconds without progress after which a server that prepares counts as hung."""
SERVER_ENDED = {"error": "its server has ended"}
SAID_NOTHING = "it said nothing"
STOP_S = process_guard.KILL_DEADLINE_S + 5.0
TAIL_BYTES = 4096
KILL_AFTER_S = 10.0
"""Seconds after its deadline at which a call that cannot be interrupted ends with its process."""
KILLED = f"signal {signal.SIGKILL:d}"
DEATH_SHOWS_S = 30.0
"""Seconds after the end of its answers within which a process has ended."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


def scrubbed_environment(**variables: str) -> dict[str, str]:
    """Return all environment variables of a server: ``variables`` and fixed ones; the owner's may hold tokens."""
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
    """The process ended in the middle of a call while its server lives, so the call was the cause.

    ``killed`` says that the process got a SIGKILL that we did not send.
    """

    def __init__(self, how: str, killed: bool = False) -> None:
        super().__init__(how)
        self.killed = killed


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even if the caller is cancelled; else the answer to a cut-off question would be read as
    the next answer."""
    return await asyncio.shield(asyncio.ensure_future(work))


class ForkServer:
    """A server that forks processes. It starts with the first :meth:`fork`; if it died, the next fork starts it again.

    Args:
        name: the server's name in messages.
        command: the command that starts the server; the number of the server's socket is added at the end.
        config: sent as JSON in the first line of the server's standard input.
        away: makes an exception from a message; raised if the server does not start or has ended, or if a process
            reports that something it needs has ended.
        environment: the server's environment variables; None: the owner's.
        longest_answer: most bytes of an answer; a process that sends more is ended. If agents' code runs there, choose
            little more than the part that we show, because the owner stands still while it reads a long line.
        log: the file to which the output of the server and its processes is appended; None: the owner's standard error.

    ``restarts`` counts how often a new server replaced one that had died.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        config: Mapping[str, Any],
        away: Callable[[str], Exception],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        longest_answer: int = MAX_LINE,
    ) -> None:
        self.name = name
        self.away = away
        self._command = command
        self._config_line = json.dumps(config).encode() + b"\n"
        self._environment = environment
        self._log = log
        self._longest_answer = longest_answer
        self.restarts = 0
        self.alive = False
        """True while the server runs."""
        self.starts = 0
        """The number of its starts; a process belongs to one of them."""
        self._closing = False
        self._ready: Mapping[str, Any] = {}
        self._guard: asyncio.subprocess.Process | None = None
        self._control: socket.socket
        self._printed: asyncio.Future[None]
        self._listening: asyncio.Future[None] | None = None
        self._tail = b""
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()
        """The callers that wait for a process, in the order in which they asked."""
        self._processes: dict[int, asyncio.Future[int | None]] = {}
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int:
        """The process id of the guard, the parent of the server and all its processes; 0 if there is no guard."""
        return 0 if self._guard is None else self._guard.pid

    async def start(self) -> Mapping[str, Any]:
        """Start the server unless it runs; return the server's ``ready`` message.

        Raises:
            away: the server does not start.
        """
        return await _to_its_end(self._ensure_running())

    async def fork(self) -> ForkedProcess:
        """Return a new process.

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
                await self.start()
                answer = await self.ask({"fork": True}, theirs.fileno(), running_time.tick())
                if answer is SERVER_ENDED:  # it died on the way
                    await self.start()
                    answer = await self.ask({"fork": True}, theirs.fileno(), running_time.tick())
            if "error" in answer:
                raise self.away(f"a {self.name} process cannot be started: {answer['error']}")
            reader, writer = await asyncio.open_connection(sock=ours, limit=self._longest_answer)
        except BaseException:
            ours.close()
            raise
        return ForkedProcess(self, answer, reader, writer)

    def kill(self) -> None:
        """End the server and every process, at once."""
        if self._guard is not None and self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._guard.terminate()  # the guard's grace is zero

    async def close(self) -> None:
        """End the server and every process, also one that is about to start."""
        self._closing = True
        self.kill()
        async with self._lock:
            await self._stop()

    async def ask(self, message: Mapping[str, Any], *descriptors: int) -> dict[str, Any]:
        """Send the server a message, such as a request for a process with a socket for it, and return the answer.

        Returns:
            The answer; holds ``error`` if the server gave none. An answer with a ``pid`` also holds ``ready`` (the
            server's ready message), ``start`` (the number of the server's start) and ``ended`` (a future of the
            process's wait status, None if its server ends before).
        """
        if not self.alive:
            return SERVER_ENDED
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.send(message, *descriptors)
        try:
            return await while_moving(answer, self.pid)
        except Stalled as error:
            self.kill()
            return {"error": f"its server {error}, and is ended"}

    def send(self, message: Mapping[str, Any], *descriptors: int) -> None:
        """Send a message as soon as the socket has room; the caller must keep ``descriptors`` open until the answer."""
        if self.alive:
            self._unsent.append((json.dumps(message).encode(), list(descriptors)))
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                socket.send_fds(self._control, [data], descriptors)
                self._unsent.popleft()
            loop.remove_writer(self._control)
        except BlockingIOError:
            loop.add_writer(self._control, self._flush)
        except OSError:  # it has ended, as _listen notices
            self._unsent.clear()
            loop.remove_writer(self._control)

    async def _ensure_running(self) -> Mapping[str, Any]:
        async with self._lock:
            if self.alive:
                return self._ready
            if self._guard is not None:
                logger.warning("the %s server died; starting another", self.name)
                self.restarts += 1
                await self._stop()
            self._closing = False
            message = await self._start_once()
            if message == {"failed": SAID_NOTHING} and not self._closing:
                logger.warning("the %s server died as it started, without a word; starting it once more", self.name)
                message = await self._start_once()
            if "ready" not in message:
                raise self.away(f"the {self.name} server does not start: {message['failed']}")
            self._ready = message["ready"]
            self._listening = asyncio.ensure_future(self._listen())
            return self._ready

    async def _start_once(self) -> dict[str, Any]:
        """Start the server once. Return its ``ready`` message or, when nothing of it is left, why it ``failed``."""
        self._guard = await self._launch()
        try:
            message = await self._prepare(self._guard)
        except Stalled as error:
            message = {"failed": f"it {error}"}
        except OSError:
            message = {}
        if "ready" not in message:
            await self._stop()
        return message or {"failed": self._last_words()}

    async def _launch(self) -> asyncio.subprocess.Process:
        """Start the guard, and the server below the guard."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", process_guard.__file__, str(os.getpid()), "0"),
                *(*self._command, str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
                start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        assert guard.stderr is not None, "it was asked for"
        self._control, self._tail = ours, b""
        self._printed = asyncio.ensure_future(self._drain(guard.stderr))
        self.alive = True
        self.starts += 1
        return guard

    async def _prepare(self, guard: asyncio.subprocess.Process) -> dict[str, Any]:
        """Send the server its config line, and return its first message; raises OSError or Stalled if none comes."""
        assert guard.stdin is not None, "it was asked for"
        guard.stdin.write(self._config_line)
        await guard.stdin.drain()
        guard.stdin.close()  # so that code that reads a line there is refused, and does not hang
        return await while_moving(self._receive(), guard.pid, PREPARE_S)

    async def _listen(self) -> None:
        try:
            while True:
                match await self._receive():
                    case {"ended": int(pid), "status": int(status)}:
                        self._processes.pop(pid).set_result(status)
                    case answer:
                        if "pid" in answer:
                            ended = self._processes[answer["pid"]] = asyncio.get_running_loop().create_future()
                            answer |= {"ready": self._ready, "start": self.starts, "ended": ended}
                        if not (waiter := self._answers.popleft()).done():
                            waiter.set_result(answer)
        except OSError:
            pass
        finally:
            self._end()

    async def _receive(self) -> dict[str, Any]:
        """Return the server's next message; raises OSError if the server has ended."""
        message = await asyncio.get_running_loop().sock_recv(self._control, MAX_MESSAGE)
        if not message:
            raise ConnectionError("it has ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _end(self) -> None:
        """Note the server's end, and tell all callers that wait."""
        self.alive = False
        asyncio.get_running_loop().remove_writer(self._control)
        self._unsent.clear()
        for ended in self._processes.values():
            ended.set_result(None)
        self._processes.clear()
        for waiter in self._answers:
            if not waiter.done():
                waiter.set_result(SERVER_ENDED)
        self._answers.clear()

    async def _stop(self) -> None:
        """End the server, and return when none of its processes is left."""
        if self._guard is None:
            return
        self.kill()
        try:
            await asyncio.wait_for(self._guard.wait(), STOP_S)
        except TimeoutError:
            self._guard.kill()
            await self._guard.wait()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._listening = None
        self._end()
        self._control.close()
        await asyncio.wait([self._printed], timeout=1.0)
        self._printed.cancel()
        self._guard = None

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(MAX_MESSAGE):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self._log is None:
                sys.stderr.write(chunk.decode(errors="replace"))
            else:
                await asyncio.to_thread(_append, self._log, chunk)

    def _last_words(self) -> str:
        """Return the last line that the server printed."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else SAID_NOTHING


def _append(log: Path, chunk: bytes) -> None:
    with contextlib.suppress(OSError), open(log, "ab") as file:  # its folder is gone, or the disk full
        file.write(chunk)


def _end_unwanted(forking: asyncio.Task[ForkedProcess]) -> None:
    if not forking.cancelled() and forking.exception() is None:
        forking.result().kill()


class ForkedProcess:
    """A process that answers one request at a time. ``ready`` is the message that its server sent when it was ready."""

    def __init__(
        self,
        server: ForkServer,
        forked: Mapping[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid: int = forked["pid"]
        self.ready: Mapping[str, Any] = forked["ready"]
        self._server = server
        self._start: int = forked["start"]
        self.ended: asyncio.Future[int | None] = forked["ended"]
        """Its wait status; None where its server has ended before."""
        self.killed = False
        """True once it was ended from here."""
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()
        self._until: asyncio.Timeout | None = None

    @property
    def alive(self) -> bool:
        """True until the process ends or is ended."""
        return not self.killed and not self.ended.done()

    async def ask(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        """Return the result of the operation ``op``, which must be over within ``deadline_s``.

        If a call is cancelled, it is interrupted, and the next call waits until it is over.

        Raises:
            DeadlinePassed, Raised, WrongArguments: the call did. A call that could not be interrupted has ended with
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
        """Send a request and return the raw answer. If the caller is cancelled, the call is interrupted.

        Raises:
            DeadlinePassed: the call took longer and could not be interrupted; the process was ended.
            ProcessEnded: the process ended, or sent what is not an answer and was ended.
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
            ProcessEnded: the process ended, or sent what is not an answer and was ended.
            away: the server ended.
        """
        with contextlib.suppress(OSError):  # it has ended, as the reader of its answer notices
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
        return await self.answer()

    async def exchange_while_it_moves(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Exchange as :meth:`exchange` does, but end the server and its processes if they stand still.

        Raises:
            ProcessEnded, away: as in :meth:`exchange`; away also if the processes stood still.
        """
        try:
            return await while_moving(self.exchange(request), self._server.pid)
        except Stalled as error:
            if self._server_runs:
                self._server.kill()
            raise self._server.away(f"the {self._server.name} server {error}, and is ended") from error

    async def answer(self) -> dict[str, Any]:
        """Return the next answer, to a request whose caller no longer waits; raises as :meth:`exchange` does."""
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        except ValueError:  # too long
            line = b"\n"
        if line.endswith(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    return answer
            await self.end()
            raise ProcessEnded("its process sent what is not an answer")
        await asyncio.wait([self.ended], timeout=DEATH_SHOWS_S)
        by_itself = self.ended.done() and not self.killed
        how = await self.end()
        raise ProcessEnded(f"its process ended with {how}", killed=by_itself and how == KILLED)

    async def has_server(self) -> bool:
        """Ask whether the process's server lives, and all processes that the server needs; the server checks them."""
        return self._server_runs and "error" not in await self._server.ask({"here": True})

    @property
    def _server_runs(self) -> bool:
        """False once the process's server is known to have ended; a new server may have taken its place."""
        return self._server.alive and self._server.starts == self._start

    @property
    def busy(self) -> bool:
        """True while a call is being made, even if its caller no longer waits."""
        return self._lock.locked()

    async def idle(self) -> None:
        """Return once no call is being made."""
        async with self._lock:
            pass

    def interrupt(self) -> None:
        """End the call that is being made: at once if it can be interrupted, else soon with the process."""
        if self.alive and self._until is not None:
            with contextlib.suppress(RuntimeError):  # it is over already: the process is being ended
                self._until.reschedule(asyncio.get_running_loop().time() + KILL_AFTER_S)
            self._server.send({"interrupt": self.pid})

    def kill(self) -> None:
        """End the process and all that it started."""
        self.killed = True
        self._writer.close()
        if self._server_runs:
            self._server.send({"kill": self.pid})

    async def end(self) -> str:
        """End the process and all that it started; return how it ended, even if it had ended before.

        Raises:
            away: the server has ended, and all its processes with it.
        """
        self.kill()
        await asyncio.wait([self.ended], timeout=STOP_S)
        status = self.ended.result() if self.ended.done() else None
        if status is None:
            if self._server_runs:
                self._server.kill()  # it hangs
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
