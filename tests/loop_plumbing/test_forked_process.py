"""The fork machine: servers that are slow, hang, die or do not start, and processes that send what is no answer."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from loop_plumbing import forked_process, moving
from loop_plumbing.forked_process import ForkServer, ProcessEnded
from support.processes import parent_of
from support.waiting import wait_until

ROOT = str(Path(__file__).parents[2])
PROGRAM = """
import os, signal, socket, sys, time
sys.path.append({root!r})
from loop_plumbing import fork_server


def answer(request):
    match request["op"]:
        case "say":
            return {{"result": request["text"]}}
        case "leave":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "garble":
            for descriptor in os.listdir("/proc/self/fd"):
                try:
                    os.write(int(descriptor), b"[1]\\n") if int(descriptor) > 2 else None
                except OSError:
                    pass
            time.sleep(3600)
        case "long":
            return {{"result": "x" * (65 << 20)}}


def prepare():
    {preparing}
    return fork_server.Prepared(fork_server.answers(lambda: answer), {{"told": told}})


told = sys.stdin.readline().strip()
fork_server.serve(socket.socket(fileno=int(sys.argv[1])), prepare)
"""


class Away(Exception):
    pass


@pytest.fixture
async def serving():
    servers = []

    def serve(preparing="pass"):
        program = PROGRAM.format(root=ROOT, preparing=preparing)
        servers.append(ForkServer("test", (sys.executable, "-c", program), {"a": 1}, Away))
        return servers[-1]

    yield serve
    for server in servers:
        await server.close()


async def test_a_server_that_computes_while_it_starts_is_waited_for_and_gives_signs(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(forked_process, "STALL_S", 0.2)
    go, begun = tmp_path / "go", tmp_path / "begun"
    before = moving.signs()
    server = serving(f"open({str(begun)!r}, 'w').close()\n    while not os.path.exists({str(go)!r}): pass")
    forking = asyncio.create_task(server.fork())
    await wait_until(begun.exists)
    await asyncio.sleep(1.0)
    assert not forking.done()
    assert moving.signs() > before, "who waits for this process sees that it moves"
    go.touch()
    process = await forking
    assert process.ready == {"told": '{"a": 1}'}
    assert await process.ask("say", 60.0, text="x") == "x"


@pytest.mark.parametrize(
    ("preparing", "why"),
    [
        ("time.sleep(3600)", "it used no processor for 1 s"),
        ("raise KeyError('why')", "KeyError: 'why'"),
        ("sys.exit('enough')", "SystemExit: enough"),
        ("os.write(2, b'out of order\\n'); os._exit(1)", "out of order"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it said nothing"),
    ],
)
async def test_a_server_that_does_not_start_is_said_in_one_line(serving, monkeypatch, preparing, why):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(forked_process, "STALL_S", 1.0)
    with pytest.raises(Away, match=f"^the test server does not start: {why}"):
        await serving(preparing).fork()


@pytest.mark.parametrize(
    ("op", "how", "killed"),
    [
        ("leave", "its process ended with status 3", False),
        ("killed", "its process ended with signal 9", True),
        ("garble", "its process sent what is no answer", False),
    ],
)
async def test_how_a_process_ended_is_told(serving, op, how, killed):
    server = serving()
    process, neighbour = await server.fork(), await server.fork()
    with pytest.raises(ProcessEnded, match=how) as ended:
        await process.ask(op, 60.0)
    assert (ended.value.killed, process.alive) == (killed, False)
    with pytest.raises(ProcessEnded, match="it had ended before"):
        await process.ask("say", 60.0, text="x")
    assert await neighbour.ask("say", 60.0, text="x") == "x"


async def test_a_result_that_is_too_long_is_an_error_of_the_call(serving):
    process = await serving().fork()
    with pytest.raises(forked_process.Raised, match="its result is too long"):
        await process.ask("long", 600.0)
    assert await process.ask("say", 60.0, text="x") == "x"


async def test_a_server_that_dies_is_started_again_and_its_processes_are_away(serving):
    server = serving()
    process = await server.fork()
    os.kill(parent_of(process.pid), signal.SIGKILL)
    await wait_until(lambda: not process.alive)
    with pytest.raises((Away, ProcessEnded)):
        await process.ask("say", 60.0, text="x")
    assert await (await server.fork()).ask("say", 60.0, text="x") == "x"


async def test_a_hundred_processes_at_once_come_and_go(serving):
    server = serving()
    processes = await asyncio.gather(*(server.fork() for _ in range(100)))
    assert len({process.pid for process in processes}) == 100
    for process in processes:
        process.kill()
    await wait_until(lambda: not any(process.alive for process in processes))
    await wait_until(lambda: all(process.ended.done() for process in processes))
