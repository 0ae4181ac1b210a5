"""A running fork server, as its owner has it: its start below the guard, what is said to it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loop_plumbing import process_guard
from loop_plumbing.fork_server import MAX_MESSAGE
from loop_plumbing.moving import Stalled, while_moving

STALL_S = 600.0
"""A server that prepares, and for so long neither computes nor waits for a processor or a disk, hangs."""
SERVER_ENDED = {"error": "its server has ended"}
STOP_S = process_guard.KILL_DEADLINE_S + 5.0
TAIL_BYTES = 4096


class RunningServer:
    """A server from its start to its end. ``over`` is done once it has ended."""

    def __init__(
        self, guard: asyncio.subprocess.Process, control: socket.socket, stderr: asyncio.StreamReader, log: Path | None
    ) -> None:
        self.ready: Mapping[str, Any] = {}
        self._guard = guard
        self._control = control
        self._tail = b""
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()
        """Of those who wait for a process, in the order in which they asked."""
        self._processes: dict[int, asyncio.Future[int | None]] = {}
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._printed = asyncio.ensure_future(self._drain(stderr, log))
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str] | None, log: Path | None
    ) -> RunningServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", process_guard.__file__, str(os.getpid()), "0"),
                *(*command, str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        assert guard.stderr is not None, "it was asked for"
        return cls(guard, ours, guard.stderr, log)

    async def prepared(self, told: bytes) -> dict[str, Any]:
        """Hand it its first line, and return its first message; raises OSError or Stalled where none comes."""
        stdin = self._guard.stdin
        assert stdin is not None, "it was asked for"
        stdin.write(told)
        await stdin.drain()
        stdin.close()  # what asks for a line there is refused, and does not hang
        said = await while_moving(self._receive(), self.pid, STALL_S)
        self._listening = asyncio.ensure_future(self._listen())
        return said

    async def ask(self, message: Mapping[str, Any], *descriptors: int) -> dict[str, Any]:
        """Send a message that is answered, such as the wish for a process that is given a socket.

        Returns:
            The answer, ``error`` where there is none; with a ``pid`` also ``ended``, which will be the process's wait
            status, None where its server ends before.
        """
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.over.done():
            return SERVER_ENDED
        self._answers.append(answer)
        self.send(message, *descriptors)
        try:
            return await while_moving(answer, self.pid)
        except Stalled as error:
            self.kill()
            return {"error": f"its server {error}, and is ended"}

    def send(self, message: Mapping[str, Any], *descriptors: int) -> None:
        """Send a message as soon as it has room; the descriptors stay open until it is answered."""
        if not self.over.done():
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
        except OSError:  # it has ended, which is seen where it is listened to
            self._unsent.clear()
            loop.remove_writer(self._control)

    @property
    def pid(self) -> int:
        """Process id of its guard."""
        return self._guard.pid

    async def _listen(self) -> None:
        try:
            while True:
                match await self._receive():
                    case {"ended": int(pid), "status": int(status)}:
                        self._processes.pop(pid).set_result(status)
                    case answer:
                        if "pid" in answer:
                            answer["ended"] = asyncio.get_running_loop().create_future()
                            self._processes[answer["pid"]] = answer["ended"]
                        if not (asked := self._answers.popleft()).done():
                            asked.set_result(answer)
        except OSError:
            pass
        finally:
            self._end()

    async def _receive(self) -> dict[str, Any]:
        """Raises OSError where the server has ended."""
        message = await asyncio.get_running_loop().sock_recv(self._control, MAX_MESSAGE)
        if not message:
            raise ConnectionError("it has ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _end(self) -> None:
        """Tell all who wait that the server is gone."""
        if not self.over.done():
            self.over.set_result(None)
        for ended in self._processes.values():
            ended.set_result(None)
        self._processes.clear()
        for asked in self._answers:
            if not asked.done():
                asked.set_result(SERVER_ENDED)
        self._answers.clear()

    async def _drain(self, stderr: asyncio.StreamReader, log: Path | None) -> None:
        while part := await stderr.read(MAX_MESSAGE):
            self._tail = (self._tail + part)[-TAIL_BYTES:]
            if log is None:
                sys.stderr.write(part.decode(errors="replace"))
            else:
                await asyncio.to_thread(_append, log, part)

    @property
    def last_words(self) -> str:
        """The last line that it printed."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def kill(self) -> None:
        """End the server and every process, at once."""
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._guard.terminate()  # the guard's grace is zero

    async def stop(self) -> None:
        """End it, and return when nothing of it is left."""
        self.kill()
        try:
            await asyncio.wait_for(self._guard.wait(), STOP_S)
        except TimeoutError:
            self._guard.kill()
            await self._guard.wait()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._end()
        self._control.close()
        await asyncio.wait([self._printed], timeout=1.0)
        self._printed.cancel()


def _append(log: Path, part: bytes) -> None:
    with contextlib.suppress(OSError), open(log, "ab") as file:  # its folder is gone, or the disk full
        file.write(part)
