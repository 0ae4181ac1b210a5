"""Runs a command with a deadline, and leaves none of its processes behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agent_environments.program_config import inherited
from agent_environments.program_protocol import Ended
from loop_plumbing import process_guard

GRACE_S = 2.0
STOP_S = GRACE_S + process_guard.KILL_DEADLINE_S + 5.0
KEPT_OUTPUT = 4096
MAX_ANSWER_BYTES = 16 << 20
"""The bytes of a command's standard output that are kept: its last line is the answer."""
READ_AT_ONCE = 1 << 16
NO_PROXY = ("no_proxy", "NO_PROXY")
"""Programs read one or the other."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LINE_ENDS = re.compile(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]")
"""The ends of a line, a progress bar's too, which begins its line again and colours it."""
READ_REST_S = 2.0
"""Seconds after a command's end in which its last output is read, if a process that it left holds the pipe open."""


async def run_program(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    timeout_s: float | None = None,
    answers: bool = False,
    stop: asyncio.Event | None = None,
) -> Ended:
    """Run a command below a process guard, which ends all its processes on return, on cancellation, or if we die.

    Args:
        variables: variables besides those that a program inherits from this process. The host of ``OPENAI_BASE_URL``
            is reached without a proxy.
        folder: the command's working folder.
        timeout_s: seconds after which the command is ended; None waits for ever.
        answers: whether the standard output is an answer, which is kept apart from the standard error.
        stop: an event that ends the command.

    Raises:
        OSError: the command cannot be started.
    """
    guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), str(GRACE_S), *command]
    with contextlib.ExitStack() as unread:
        printed = _OutputTail(KEPT_OUTPUT, unread)
        answer = _OutputTail(MAX_ANSWER_BYTES, unread) if answers else printed
        try:
            process = await asyncio.create_subprocess_exec(
                *guard,
                cwd=folder,
                env=program_environment(variables),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=answer.write_end,
                stderr=printed.write_end,
                start_new_session=True,
            )
        finally:
            for pipe in {printed, answer}:
                os.close(pipe.write_end)
        unread.pop_all()
    reading = [asyncio.create_task(pipe.read()) for pipe in {printed, answer}]
    waits = [asyncio.create_task(waited) for waited in (process.wait(), *([stop.wait()] if stop else []))]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        status = process.returncode
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.shield(asyncio.ensure_future(_end(process)))
        await asyncio.wait(reading, timeout=READ_REST_S)
        for each in reading:
            each.cancel()
    if not answers:
        return Ended(status, printed.text)
    last = next((line for line in reversed(_LINE_ENDS.split(answer.text)) if line.strip()), "")
    return Ended(status, printed.text or last[-KEPT_OUTPUT:], last)


class _OutputTail:
    """A pipe that keeps the last bytes written to it.

    asyncio's own pipes cannot be used, because asyncio waits until a pipe is closed, and a process that escaped the
    guard may hold it open for ever.
    """

    def __init__(self, most: int, unread: contextlib.ExitStack) -> None:
        self._read_end, self.write_end = os.pipe()
        unread.callback(os.close, self._read_end)
        self._most = most
        self._bytes = bytearray()

    async def read(self) -> None:
        """Read the pipe until it ends, then close it."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(self._read_end, "rb", 0)
        )
        try:
            while data := await stream.read(READ_AT_ONCE):
                self._bytes += data
                del self._bytes[: -self._most]
        finally:
            transport.close()

    @property
    def text(self) -> str:
        """Return the last bytes of the output as text."""
        return self._bytes.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Make the guard end the command and all processes that the command started."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def program_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a program's environment variables: those it may inherit from this process, and ``variables``."""
    return _past_proxies({**inherited(), **variables})


def _past_proxies(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with the node's host and loopback added to the hosts that need no proxy."""
    node = urlsplit(variables.get("OPENAI_BASE_URL", "")).hostname
    direct = [*LOOPBACK, *([node] if node else [])]
    unproxied = next((variables[name] for name in NO_PROXY if name in variables), "")
    hosts = unproxied if unproxied.strip() == "*" else ",".join([*filter(None, [unproxied]), *direct])
    return {**variables, **dict.fromkeys(NO_PROXY, hosts)}
