"""One command with a deadline, and nothing of it left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agent_environments.program_protocol import Ended
from loop_plumbing import process_guard

GRACE_S = 2.0
STOP_S = GRACE_S + process_guard.KILL_DEADLINE_S + 5.0
KEPT_OUTPUT = 4096
READ_AT_ONCE = 1 << 16
NO_PROXY = ("no_proxy", "NO_PROXY")
"""Programs read one or the other."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
READ_REST_S = 2.0
"""How long after the end of a command its last output is read, if a process that it left holds the pipe open."""


async def run_program(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, timeout_s: float | None = None
) -> Ended:
    """Run a command below a process guard: all of it ends when this returns, is cancelled, or this process dies.

    Args:
        variables: added to those of this process that are no secrets of its own. The host of ``OPENAI_BASE_URL`` is
            reached without a proxy.
        folder: where it starts.
        timeout_s: after which it is ended; None waits.

    Raises:
        OSError: it cannot be started.
    """
    guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), str(GRACE_S), *command]
    read_end, write_end = os.pipe()
    try:
        # A pipe of our own: asyncio waits for the end of those that it makes, and a process that has got away from the
        # guard may hold one open for ever.
        process = await asyncio.create_subprocess_exec(
            *guard,
            cwd=folder,
            env=program_environment(variables),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_end,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    output = bytearray()
    reading = asyncio.create_task(_keep_last(read_end, output))
    try:
        async with asyncio.timeout(timeout_s):
            status: int | None = await process.wait()
    except TimeoutError:
        status = None
    finally:
        await asyncio.shield(asyncio.ensure_future(_end(process)))
        await asyncio.wait([reading], timeout=READ_REST_S)
        reading.cancel()
    return Ended(status, output.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the guard end the command and all that it started."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _keep_last(read_end: int, output: bytearray) -> None:
    """Read the pipe to its end, keep the last bytes in ``output``, and close it."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
    )
    try:
        while data := await stream.read(READ_AT_ONCE):
            output += data
            del output[:-KEPT_OUTPUT]
    finally:
        transport.close()


def program_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: what it may inherit of this process's, and ``variables``."""
    return _past_proxies({**_inherited(), **variables})


def _inherited() -> dict[str, str]:
    """This process's variables, without what names a token, a key, a secret or a password."""
    secret = ("TOKEN", "KEY", "SECRET", "PASSWORD")
    return {name: value for name, value in os.environ.items() if not any(word in name.upper() for word in secret)}


def _past_proxies(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with the node's host and loopback among the hosts that no proxy of the internet is asked for."""
    node = urlsplit(variables.get("OPENAI_BASE_URL", "")).hostname
    direct = [*LOOPBACK, *([node] if node else [])]
    given = next((variables[name] for name in NO_PROXY if name in variables), "")
    hosts = given if given.strip() == "*" else ",".join([*filter(None, [given]), *direct])
    return {**variables, **dict.fromkeys(NO_PROXY, hosts)}
