"""The owner's end of a fork server and of its processes (:mod:`loop_plumbing.fork_server`).

The server runs below :mod:`loop_plumbing.process_guard`: it ends with the owner, and with all that was started in
its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from agent_environments.protocol import EnvironmentCrashed, Grade, Requirement
from loop_plumbing import process_guard
from loop_plumbing.breakage import Raised
from loop_plumbing.fork_server import MAX_LINE, MAX_MESSAGE, DeadlinePassed, WrongArguments

START_DEADLINE_S = 600.0
"""For the import of the module."""
ANSWER_DEADLINE_S = 60.0
"""For the server, which only forks and kills."""
KILL_AFTER_S = 10.0
"""How long after its deadline a call that cannot be interrupted ends with its process."""
STOP_S = process_guard.KILL_DEADLINE_S + 5.0

T = TypeVar("T")


class ProcessEnded(Exception):
    """The process ended in the middle of a call, and the server lives: the call was the cause. Says how it ended."""


def read_grade(fields: dict[str, Any]) -> Grade:
    """The grade that a process has sent; whether its values may stand in a grade is not looked at."""
    requirements = tuple(Requirement(**each) for each in fields["requirements"])
    return Grade(**{**fields, "requirements": requirements, "broke": None, "tools": ()})


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """A question that is cut off would leave its answer to the next one: it goes on when the caller is cancelled."""
    return await asyncio.shield(asyncio.ensure_future(work))


class ForkServer:
    """Starts with the first :meth:`fork`, and again with the next one where it has died.

    Args:
        name: of the server in messages.
        command: starts it; the number of its socket comes last.
        told: the first line of its standard input, as JSON.
        environment: its variables; None: the owner's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        told: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._command = command
        self._told = json.dumps(told).encode() + b"\n"
        self._environment = environment
        self._guard: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starts = 0
        self._lock = asyncio.Lock()

    async def fork(self) -> ForkedProcess:
        """A new process.

        Raises:
            EnvironmentCrashed: the server does not start, or there is no memory.
        """
        ours, theirs = socket.socketpair()
        try:
            answer = await self._ask({"fork": True}, theirs.fileno())
            if "error" in answer:
                raise EnvironmentCrashed(f"a {self._name} process cannot be started: {answer['error']}")
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ForkedProcess(self, self._starts, answer["pid"], reader, writer)

    async def end(self, start: int, pid: int) -> str:
        """Kill a process that was forked after this many starts; says how it ended, which may have been before.

        Raises:
            EnvironmentCrashed: the server that forked it has ended, and all its processes with it.
        """
        if start != self._starts:
            raise EnvironmentCrashed(f"the {self._name} server has ended")
        ended: str = (await self._ask({"end": pid}))["ended"]
        return ended

    def interrupt(self, start: int, pid: int) -> None:
        """End the call that a process is making, if it lets itself be interrupted."""
        if self._control is not None and start == self._starts:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"interrupt": pid}).encode())

    async def close(self) -> None:
        """End the server and every process."""
        async with self._lock:
            await self._stop()

    async def _ask(self, message: dict[str, Any], descriptor: int | None = None) -> dict[str, Any]:
        return await _to_its_end(self._round_trip(message, None if descriptor is None else os.dup(descriptor)))

    async def _round_trip(self, message: dict[str, Any], descriptor: int | None) -> dict[str, Any]:
        async with self._lock:
            try:
                if self._control is None:
                    if descriptor is None:
                        raise EnvironmentCrashed(f"the {self._name} server has ended")
                    await self._start()
                assert self._control is not None, "it was started"
                descriptors = [] if descriptor is None else [descriptor]
                socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
                return await self._receive(ANSWER_DEADLINE_S)
            except OSError as error:
                await self._stop()
                raise EnvironmentCrashed(f"the {self._name} server has ended: {error}") from error
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    async def _start(self) -> None:
        self._starts += 1
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", process_guard.__file__, str(os.getpid()), "0"),
                *(*self._command, str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
                start_new_session=True,  # a Ctrl-C at the terminal is the node's to handle
            )
        finally:
            theirs.close()
        stdin = self._guard.stdin
        assert stdin is not None, "it was asked for"
        stdin.write(self._told)
        await stdin.drain()
        started = await self._receive(START_DEADLINE_S)
        if "failed" in started:
            await self._stop()
            raise EnvironmentCrashed(f"the {self._name} server does not start: {started['failed']}")

    async def _receive(self, deadline_s: float) -> dict[str, Any]:
        """Raises OSError where nothing comes."""
        assert self._control is not None, "it was started"
        async with asyncio.timeout(deadline_s):
            message = await asyncio.get_running_loop().sock_recv(self._control, MAX_MESSAGE)
        if not message:
            raise ConnectionError("its log says why")
        answer: dict[str, Any] = json.loads(message)
        return answer

    async def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if guard.returncode is None:
            guard.terminate()
        try:
            await asyncio.wait_for(guard.wait(), STOP_S)
        except TimeoutError:
            guard.kill()
            await guard.wait()


class ForkedProcess:
    """A process that answers one request at a time."""

    def __init__(
        self, server: ForkServer, start: int, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self.alive = True
        self._server = server
        self._start = start
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()
        self._until: asyncio.Timeout | None = None

    async def ask(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        """Return the result of a method of :class:`~agent_environments.tools.forked.Calls`
        ``deadline_s``.

        A call that is cancelled is interrupted; the next one waits until it is over.

        Raises:
            DeadlinePassed, Raised, WrongArguments: of the call. A call that could not be interrupted has ended with
                the process.
            ProcessEnded: the process ended.
            EnvironmentCrashed: the server ended, or something else that the call needs is away.
        """
        try:
            answer = await _to_its_end(self._round_trip({"op": op, **arguments}, deadline_s))
        except asyncio.CancelledError:
            self.interrupt()
            raise
        if "crashed" in answer:
            raise EnvironmentCrashed(answer["crashed"])
        if "late" in answer:
            raise DeadlinePassed(answer["late"])
        if "raised" in answer:
            raise Raised(answer["raised"], answer.get("place", ""))
        if "wrong" in answer:
            raise WrongArguments(answer["wrong"])
        return answer["result"]

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
            self._server.interrupt(self._start, self.pid)

    async def end(self) -> str:
        """Kill it and all that it started; says how it ended."""
        self.alive = False
        self._writer.close()
        return await self._server.end(self._start, self.pid)

    async def _round_trip(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        async with self._lock:
            if not self.alive:
                raise ProcessEnded("it had ended before")
            try:
                async with asyncio.timeout(deadline_s + KILL_AFTER_S) as self._until:
                    self._writer.write(json.dumps(request).encode() + b"\n")
                    await self._writer.drain()
                    line = await self._reader.readline()
                answer = json.loads(line)
                if isinstance(answer, dict):
                    return answer
            except TimeoutError as error:
                await self.end()
                raise DeadlinePassed(f"took longer than {deadline_s:g} s, and was ended") from error
            except (OSError, ValueError):  # a line that is empty, cut off, too long or none of ours
                pass
            finally:
                self._until = None
            raise ProcessEnded(f"its process ended with {await self.end()}")
