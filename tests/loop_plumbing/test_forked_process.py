"""The fork machine: servers that are slow, hang, die or do not start, and processes that send what is not an answer."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from loop_plumbing import forked_process, moving
from loop_plumbing.forked_process import MAX_LINE, ForkedProcess, ForkServer, ProcessEnded, scrubbed_environment
from support.processes import alive, parent_of
from support.texts import texts_beside
from support.waiting import wait_until

TABLES = texts_beside(__file__)

ROOT = str(Path(__file__).parents[2])
PROGRAM = texts_beside(__file__)["program"]


class Away(Exception):
    pass


@pytest.fixture
async def serving():
    servers = []

    def serve(preparing="pass", **options):
        program = PROGRAM.format(root=ROOT, preparing=preparing)
        servers.append(ForkServer("test", (sys.executable, "-c", program), {"a": 1}, Away, **options))
        return servers[-1]

    yield serve
    for server in servers:
        await server.close()


async def test_a_server_that_computes_while_it_starts_is_waited_for_and_gives_signs(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(forked_process, "PREPARE_S", 0.2)
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
    assert process.ready == {"told": '{"a": 1}', "needs": []}
    assert await process.ask("say", 60.0, text="x") == "x"


@pytest.mark.parametrize(("preparing", "why"), TABLES["a_server_that_does_not_start_is_said_in_one_line"])
async def test_a_server_that_does_not_start_is_said_in_one_line(serving, monkeypatch, preparing, why):
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(forked_process, "PREPARE_S", 1.0)
    with pytest.raises(Away, match=f"^the test server does not start: {why}"):
        await serving(preparing).fork()


DIES = "open('starts', 'a').write('x'); len(open('starts').read()) <= {kills} and os.kill({pid}, signal.SIGKILL)"


@pytest.mark.fault("a child that is killed while it starts, without a word, ends the whole command")
@pytest.mark.parametrize("pid", ["os.getpid()", "os.getppid()"], ids=["server", "guard"])
@pytest.mark.parametrize("kills", [1, 2])
async def test_a_server_that_is_killed_as_it_starts_is_started_once_more(serving, tmp_path, monkeypatch, pid, kills):
    monkeypatch.chdir(tmp_path)
    server = serving(DIES.format(kills=kills, pid=pid))
    with pytest.raises(Away, match="it said nothing") if kills == 2 else contextlib.nullcontext():
        assert await (await server.fork()).ask("say", 60.0, text="x") == "x"
    assert (tmp_path / "starts").read_text() == "xx"


async def test_a_server_that_is_closed_as_it_starts_is_not_started_once_more(serving, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = serving("open('starts', 'a').write('x')\n    time.sleep(3600)")
    starting = asyncio.create_task(server.start())
    await wait_until((tmp_path / "starts").exists)
    await server.close()
    with pytest.raises(Away):
        await starting
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.parametrize(("op", "how", "killed"), TABLES["how_a_process_ended_is_told"])
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
    assert server.restarts == 1


async def test_a_server_ends_with_what_it_needs(serving):
    server = serving("needs = {subprocess.Popen(['sleep', '3600']).pid: 'the helper'}")
    process, other = await server.fork(), await server.fork()
    (helper,) = process.ready["needs"]
    assert await process.has_server()
    other.kill()
    await other.ended
    assert await process.has_server(), "one of its processes is nothing that it needs"
    os.kill(helper, signal.SIGKILL)
    await wait_until(lambda: not alive(helper))
    assert not await process.has_server(), "it looks before it answers"
    assert await (await server.fork()).ask("say", 60.0, text="x") == "x"


async def test_a_server_that_stands_still_gives_no_process_and_is_ended(serving, monkeypatch):
    server = serving()
    process = await server.fork()
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(moving, "STALL_S", 0.2)
    os.kill(parent_of(process.pid), signal.SIGSTOP)
    with pytest.raises(Away, match=r"cannot be started: its server used no processor for 0\.2 s, and is ended"):
        await server.fork()
    await wait_until(lambda: not server.alive)


async def test_a_process_that_stands_still_over_a_patient_request_ends_with_its_server(serving, monkeypatch):
    server = serving()
    process = await server.fork()
    assert await process.exchange_while_it_moves({"op": "say", "text": "x"}) == {"result": "x"}
    monkeypatch.setattr(moving, "POLL_S", 0.02)
    monkeypatch.setattr(moving, "STALL_S", 0.2)
    with pytest.raises(Away, match=r"the test server used no processor for 0\.2 s, and is ended"):
        await process.exchange_while_it_moves({"op": "hang"})
    await wait_until(lambda: not server.alive)


async def test_an_answer_that_was_not_waited_for_is_the_next_one(serving):
    process = await (serving()).fork()
    asked = asyncio.create_task(process.exchange({"op": "say", "text": "first"}))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert await process.exchange({"op": "say", "text": "second"}) == {"result": "first"}
    assert await process.answer() == {"result": "second"}


async def test_a_log_has_what_is_printed_and_a_scrubbed_environment_nothing_of_the_owners(
    serving, tmp_path, monkeypatch
):
    monkeypatch.setenv("TOKEN", "secret")
    log = tmp_path / "log"
    log.write_text("before\n")
    server = serving("os.write(2, b'warm\\n')", log=log, environment=scrubbed_environment(PATH=os.defpath))
    variables = await (await server.fork()).ask("variables", 60.0)
    assert "secret" not in variables.values()
    assert (variables["PATH"], variables["PYTHONHASHSEED"]) == (os.defpath, "0")
    await wait_until(lambda: log.read_text() == "before\nwarm\n")


@pytest.mark.attack
@pytest.mark.fault("one line of a session holds up all others")
async def test_a_process_that_answers_a_longer_line_than_it_may_is_ended_at_once(serving):
    process = await serving(longest_answer=10_000).fork()
    assert len(await process.ask("say", 60.0, text="x" * 9_000)) == 9_000
    with pytest.raises(ProcessEnded, match="its process sent what is not an answer"):
        await process.ask("say", 60.0, text="x" * 100_000)
    assert not process.alive


class Writer:
    """A connection that nobody reads."""

    def close(self):
        """Nothing is open."""


async def received(data, limit=MAX_LINE):
    """What a :class:`ForkedProcess` makes of bytes that its process has sent before it ended."""
    reader = asyncio.StreamReader(limit=limit)
    reader.feed_data(data)
    reader.feed_eof()
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(signal.SIGKILL)

    server = ForkServer("test", (), {}, Away)
    forked = {"pid": 0, "ready": {}, "start": 0, "ended": ended}
    return await ForkedProcess(server, forked, reader, Writer()).answer()


async def test_whatever_a_process_sends_is_an_answer_or_a_named_error():
    rng = random.Random(0)
    starts = [b"", b"[", b'{"ok":', b"9", b"-", b"NaN", b'"\\ud800', b"\xff", b'{"ok": true}']
    for _ in range(20_000):
        data = rng.choice(starts) * rng.randrange(1, 9) + rng.randbytes(rng.randrange(9)) + rng.choice([b"", b"\n"])
        with contextlib.suppress(ProcessEnded):
            assert isinstance(await received(data), dict)
    for data in (b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n", b"[1]\n"):
        with pytest.raises(ProcessEnded, match="its process sent what is not an answer"):
            await received(data)
    with pytest.raises(ProcessEnded, match="its process sent what is not an answer"):
        await received(b"x" * 5000, limit=1000)
    for data in (b"{}", b""):
        with pytest.raises(ProcessEnded, match="its process ended with signal 9") as ended:
            await received(data)
        assert ended.value.killed
    assert await received(b'{"ok": true}\n') == {"ok": True}


async def test_a_hundred_processes_at_once_come_and_go(serving):
    server = serving()
    processes = await asyncio.gather(*(server.fork() for _ in range(100)))
    assert len({process.pid for process in processes}) == 100
    for process in processes:
        process.kill()
    await wait_until(lambda: not any(process.alive for process in processes))
    await wait_until(lambda: all(process.ended.done() for process in processes))
