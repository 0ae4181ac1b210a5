"""The client of one worker: a child under another interpreter that answers one request at a time.

The child runs below :mod:`loop_plumbing.process_guard`: whatever it starts, a JVM included, ends with it, and it
ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loop_plumbing import process_guard
from agent_environments.losses import Loss, Losses, WorldLost
from loop_plumbing.moving import while_moving
from agent_environments.remote.line import Line, RequestFailed

STOP_S = process_guard.KILL_DEADLINE_S + 5.0
KILLED_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Of a guard that got a SIGKILL, and of one whose worker did."""
MAX_LINE = 64 << 20
TAIL_BYTES = 4096
AGENTS_REQUESTS = ("step", "grade")
"""How long they take may be an agent's doing."""
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def scrubbed_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a worker: nothing of the owner's, which may hold tokens, gets near a world."""
    return {
        "HOME": "/nonexistent",
        "PATH": SYSTEM_PATH,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets iterate in the same order in every worker
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        **extra,
    }


class WorkerProcess(Line):
    """A running worker."""

    def __init__(self, process: asyncio.subprocess.Process, losses: Losses) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process was started without pipes")
        super().__init__(losses)
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._tail = b""
        self._stderr = asyncio.create_task(self._drain(process.stderr))
        self._killed = False

    @classmethod
    async def start(
        cls, command: Sequence[str | Path], environment: Mapping[str, str], losses: Losses
    ) -> WorkerProcess:
        """Start ``command``; whether it is any good shows at the first request."""
        guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), "0"]
        return cls(
            await asyncio.create_subprocess_exec(
                *guard,
                *map(str, command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=scrubbed_environment(environment),
                start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
                limit=MAX_LINE,
            ),
            losses,
        )

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        while part := await stderr.read(TAIL_BYTES):
            self._tail = (self._tail + part)[-TAIL_BYTES:]
        if not self._killed:
            self._ended()

    @property
    def pid(self) -> int:
        """Process id of its guard."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.returncode is None

    async def last_words(self) -> str:
        """The last line that an ended worker wrote to standard error."""
        await asyncio.wait([self._stderr], timeout=STOP_S)
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    async def _round_trip(self, request: Mapping[str, Any]) -> dict[str, Any]:
        line = b""
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            await self._stdin.drain()
            line = await self._stdout.readline()
            answer = json.loads(line)
        except (OSError, ValueError, RecursionError) as error:  # a line that is empty, cut off or too long
            loss = Loss.ENDED if line.endswith(b"\n") else await self._how_it_ended()
            self.kill()
            raise WorldLost(f"the worker ended at {request['op']!r}: {await self.last_words()}", loss) from error
        match answer:
            case {"ok": dict(result)}:
                return result
            case {"error": str(message)}:
                raise RequestFailed(message)
        raise WorldLost(f"the worker's answer to {request['op']!r} is none: {str(answer)[:200]}", Loss.ENDED)

    async def _how_it_ended(self) -> Loss:
        """Of a worker whose pipe has ended."""
        try:
            status = await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:  # it lives, and has closed its output
            return Loss.ENDED
        return Loss.KILLED if status in KILLED_STATUSES else Loss.ENDED

    async def _in_time(self, deadline_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        # What a world does for no command of an agent's it may do slowly; a command could compute for ever.
        if request["op"] in AGENTS_REQUESTS:
            return await super()._in_time(deadline_s, request)
        return await while_moving(self._round_trip(request), self.pid, deadline_s)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # the guard's grace is zero

    async def stop(self) -> None:
        """Kill it, and return when nothing of it is left."""
        self.kill()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await asyncio.wait([self._stderr], timeout=1.0)
        self._stderr.cancel()
        await asyncio.gather(self._stderr, return_exceptions=True)
        await self.hang_up()
