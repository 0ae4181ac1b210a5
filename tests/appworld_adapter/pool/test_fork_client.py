"""Connecting to a fork server that dies meanwhile, or hangs; the processes stand in for real servers."""

import asyncio
import contextlib
import random

import pytest

from agent_environments.protocol import EnvironmentCrashed
from appworld_adapter.pool import fork_client as servers
from appworld_adapter.pool.base import DatasetPool
from appworld_adapter.pool.fork_client import Connection, ForkServer, ServerSpec
from loop_plumbing import moving
from support.waiting import wait_until

CHILD = 4_194_305  # above the largest process id there can be


@contextlib.asynccontextmanager
async def fork_server(folder, lives_s, answer=None):
    """A process that lives for ``lives_s``, and a socket that gives ``answer`` (None: there is no socket)."""
    folder.mkdir()
    spec = ServerSpec("world", "python", folder, folder, "task_1", {})
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("sleep", str(lives_s), stdin=pipe, stdout=pipe)
    server = ForkServer(spec, process, {})

    async def serve(_, writer):
        writer.write(answer)

    listening = await asyncio.start_unix_server(serve, str(spec.socket)) if answer is not None else None
    try:
        yield server
    finally:
        server.kill()
        await server.wait_end(5)
        if listening is not None:
            listening.close()


class Pool:
    """Hands out the first server that lives."""

    def __init__(self, *candidates):
        self._candidates = candidates

    async def _server(self, role):
        return next(server for server in self._candidates if server.alive)


async def test_server_that_dies_on_the_way_is_replaced(tmp_path):
    answer = b'{"pid": %d}\n' % CHILD
    async with (
        fork_server(tmp_path / "a", lives_s=0.3) as dying,
        fork_server(tmp_path / "b", lives_s=60, answer=answer) as fresh,
    ):
        connection = await DatasetPool._child(Pool(dying, fresh), "world")
        assert connection.server is fresh
        assert connection.pid == CHILD
        connection.kill()


async def test_server_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(moving, "STALL_S", 0.2)
    async with fork_server(tmp_path / "a", lives_s=60, answer=b"") as hanging:
        with pytest.raises(EnvironmentCrashed, match=r"gave no child: it used no processor for 0\.2 s, and is ended"):
            await hanging.connect()
        await hanging.wait_end(5)
        assert not hanging.alive


async def test_a_server_lives_that_gives_a_child(tmp_path):
    async with (
        fork_server(tmp_path / "a", lives_s=60, answer=b'{"pid": %d}\n' % CHILD) as living,
        fork_server(tmp_path / "b", lives_s=60) as gone,
    ):
        assert await living.gives_children()
        assert not await gone.gives_children()


SLOW = """
touch begun
while [ ! -e go ]; do :; done
echo '{"event": "ready"}'
exec cat
"""
HANGS = "exec sleep 3600"
BROKEN = "printf 'Traceback (most recent call last):\\n  ...\\nModuleNotFoundError: no engine\\n' >&2"


def server_of(folder, program):
    """How to start a fork server whose interpreter is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    return ServerSpec("world", str(python), folder, folder, "task_1", {})


async def test_a_server_that_computes_while_it_starts_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(moving, "STALL_S", 0.2)
    starting = asyncio.create_task(ForkServer.start(server_of(tmp_path, SLOW)))
    await wait_until((tmp_path / "begun").exists)
    await asyncio.sleep(1.0)
    assert not starting.done()
    (tmp_path / "go").touch()
    server = await starting
    assert server.ready == {"event": "ready"}
    await server.stop()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (HANGS, r"used no processor for 1 s while it started \(\S+\)"),
        (BROKEN, r"did not start \(\S+\): ModuleNot.*engine"),
    ],
    ids=["hangs", "is broken"],
)
async def test_a_server_that_does_not_start_is_said_in_one_line(tmp_path, monkeypatch, program, why):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(moving, "STALL_S", 1.0)
    with pytest.raises(EnvironmentCrashed, match=f"^the world server {why}$") as raised:
        await ForkServer.start(server_of(tmp_path, program))
    assert raised.value.__suppress_context__


async def received(data, limit=servers.MAX_LINE):
    """What :meth:`Connection.call` makes of bytes that a child has sent before it closed."""
    reader = asyncio.StreamReader(limit=limit)
    reader.feed_data(data)
    reader.feed_eof()
    return await Connection(None, reader, None).call(None)


async def test_whatever_a_child_sends_is_a_message_or_a_named_error():
    rng = random.Random(0)
    starts = [b"", b"[", b'{"ok":', b"9", b"-", b"NaN", b'"\\ud800', b"\xff", b'{"ok": true}']
    for _ in range(20_000):
        data = rng.choice(starts) * rng.randrange(1, 9) + rng.randbytes(rng.randrange(9)) + rng.choice([b"", b"\n"])
        with contextlib.suppress(EnvironmentCrashed):
            assert isinstance(await received(data), dict)
    for data in (b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n", b"[1]\n", b"{}", b""):
        with pytest.raises(EnvironmentCrashed, match="the connection to the process was lost"):
            await received(data)
    with pytest.raises(EnvironmentCrashed, match="limit"):
        await received(b"x" * 5000, limit=1000)
    assert await received(b'{"ok": true}\n') == {"ok": True}
