"""Tools of a real MCP server, a child process that is killed, hangs, and is left by its owner."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from agent_environments.conformance import check_conformance
from agent_environments.tools.environment import ToolPool
from loop_contrib.mcp_tools.mcp_server import _text_of
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool
from support.processes import alive
from support.texts import texts_beside
from support.tool_modules import call, write
from support.waiting import block_until, wait_until

TEXTS = texts_beside(__file__)
SERVER = TEXTS["server"]

MODULE = TEXTS["module"]


def pool_of(tmp_path, **options):
    command = [sys.executable, write(tmp_path, SERVER, "server")]
    numbers = {"command": command, "env": {"GIVEN": "yes"}, **options}
    return ToolPool(word_spans, write(tmp_path, MODULE), mcp={"numbers": numbers})


async def observed(environment, turn):
    return (
        (await environment.step(turn)).observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    )


async def test_its_tools_are_offered_called_and_end_the_episode(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    async with open_pool(pool_of(tmp_path, terminal=["add"])) as pool:
        environment = await pool.acquire("one")
        system, _ = await environment.start("sum_1")
        assert '"name": "add", "description": "Add two numbers."' in system.content
        own = int((await observed(environment, call("pid"))).split()[0])
        assert (await observed(environment, call("pid"))).split()[1:] == ["None", "yes"], (
            "the node's secrets stay with it"
        )
        assert "Error: wrong arguments for add: a: 'x' is not of type 'integer'" in await observed(
            environment, call("add", a="x", b=1)
        )
        assert (await observed(environment, call("fail"))).startswith(
            "Error: the tool failed: Error executing tool fail"
        )
        result = await environment.step(call("add", a=17, b=25))
        assert (result.done, (await environment.grade()).success) == (True, True)
        await environment.close()
        await check_conformance(
            pool, "sum_1", [call("add", a=10**400, b=1), call("fail"), call("add", a="\ud800", b=1)]
        )
    await wait_until(lambda: not alive(own))


async def test_a_server_that_dies_or_hangs_is_told_and_started_again(tmp_path):
    async with open_pool(pool_of(tmp_path, deadline_s=60.0)) as pool, begun_episode(pool, "sum_1") as environment:
        for death in ("die", "SIGKILL"):
            before = int((await observed(environment, call("pid"))).split()[0])
            if death == "die":
                assert (await observed(environment, call("die"))).startswith("Error: the tool failed: ")
            else:
                os.kill(before, signal.SIGKILL)
                await wait_until(lambda before=before: not alive(before))
                assert (await observed(environment, call("add", a=1, b=1))).startswith("Error: the tool failed: ")
            assert await observed(environment, call("add", a=1, b=1)) == "2"
        pool._servers[0].deadline_s = 1.0
        hanging = asyncio.ensure_future(observed(environment, call("hang")))
        assert await hanging == "Error: the tool failed: took longer than 1 s"
        pool._servers[0].deadline_s = 60.0
        assert await observed(environment, call("add", a=1, b=1)) == "2"


async def test_a_server_that_hangs_as_it_starts_again_blocks_no_call_for_good(tmp_path, monkeypatch):
    hang = tmp_path / "hang"
    async with open_pool(pool_of(tmp_path, deadline_s=60.0, env={"HANG": str(hang)})) as pool:
        environment = await pool.acquire("one")
        await environment.start("sum_1")
        hang.touch()
        await observed(environment, call("die"))
        with monkeypatch.context() as patched:
            patched.setattr("loop_contrib.mcp_tools.mcp_server.START_DEADLINE_S", 0.5)
            told = await observed(environment, call("add", a=1, b=1))
        assert told == "Error: the tool failed: it did not start within 0.5 s"
        hang.unlink()
        assert await observed(environment, call("add", a=1, b=1)) == "2"
        hang.touch()
        await observed(environment, call("die"))
        starting = asyncio.ensure_future(observed(environment, call("add", a=1, b=1)))
        await wait_until(lambda: pool._servers[0]._connection is not None)
    assert (await starting).startswith("Error: the tool failed: ")
    await environment.close()


OWNER = TEXTS["owner"]


def test_a_server_does_not_outlive_an_owner_that_is_killed(tmp_path):
    program = OWNER.format(path=sys.path, server=write(tmp_path, SERVER, "server"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        server = int(owner.stdout.readline())
        assert alive(server)
        owner.kill()
    block_until(lambda: not alive(server))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"command": ["/nowhere/server"]}, r"MCP server numbers does not start: .*; /nowhere/server: .*nowhere/server"),
        (
            {"command": [sys.executable, "-c", "import no_such_package"]},
            r"does not start: .*; .* -c 'import no_such_package': ModuleNotFoundError: No module named 'no_such_pack",
        ),
        ({"tools": ["subtract"]}, "MCP server numbers has no tool 'subtract'; it has add, die, fail, hang, pid"),
    ],
)
async def test_what_cannot_be_used_is_one_line(tmp_path, options, complaint):
    pool = pool_of(tmp_path, **options)
    with pytest.raises(ValueError, match=complaint):
        await pool.open()
    await pool.close()


@pytest.mark.fault("a child that is killed while it starts, without a word, ends the whole command")
@pytest.mark.parametrize("kills", [1, 2])
async def test_a_server_that_is_killed_as_it_starts_is_started_once_more(tmp_path, kills):
    starts, server = tmp_path / "starts", write(tmp_path, SERVER, "server")
    script = f"echo >> {starts}; [ $(wc -l < {starts}) -gt {kills} ] || kill -9 $$; exec {sys.executable} {server}"
    pool = pool_of(tmp_path, command=["/bin/sh", "-c", script])
    with pytest.raises(ValueError, match="it said nothing") if kills == 2 else contextlib.nullcontext():
        await pool.open()
    await pool.close()
    assert len(starts.read_text()) == 2


def test_a_bad_section(tmp_path):
    with pytest.raises(ValueError, match=r"^mcp\.\w+ was given .*: 'comand'; did you mean 'command'\?"):
        pool_of(tmp_path, comand=["x"])


async def test_a_pattern_that_takes_for_ever_over_an_argument_holds_up_nobody(tmp_path):
    async with open_pool(pool_of(tmp_path, deadline_s=60.0)) as pool, begun_episode(pool, "sum_1") as environment:
        assert await observed(environment, call("send", to="a@b")) == "sent to a@b"
        assert "wrong arguments for send: to: '@' does not match" in await observed(environment, call("send", to="@"))
        environment._module.tools["send"].deadline_s = 1.0
        waiting = asyncio.ensure_future(observed(environment, call("send", to="a" * 40)))
        longest, last = 0.0, time.process_time()
        while not waiting.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.process_time() - last), time.process_time()
        assert await waiting == "Error: the tool failed: took longer than 1 s"
        assert longest < 1.0, "processor seconds of the node in one go"


@pytest.mark.parametrize(
    ("content", "structured", "shown"),
    [
        ([TextContent(text="5")], {"result": 5}, "5"),
        ([TextContent(text="1"), TextContent(text="x")], {"result": [1, "x"]}, "1\nx"),
        ([], {"rows": ["ä"]}, '{"rows": ["ä"]}'),
        ([], [], "[]"),
        ([EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="all of it"))], None, "all of it"),
        (
            [EmbeddedResource(resource=BlobResourceContents(uri="file:///a", mime_type="x/y", blob="AAAA"))],
            None,
            "[resource file:///a: x/y, 3 bytes]",
        ),
        (
            [ResourceLink(name="a", uri="file:///a", size=7, description="the file")],
            None,
            "[link file:///a: resource, 7 bytes] a: the file",
        ),
        ([ImageContent(data="AAA=", mime_type="image/png")], None, "[image: image/png, 2 bytes]"),
        (
            [AudioContent(data="AA==", mime_type="audio/wav"), TextContent(text="x")],
            None,
            "[audio: audio/wav, 1 bytes]\nx",
        ),
        ([], None, ""),
    ],
)
def test_a_result_is_its_texts_its_structured_value_and_the_names_of_what_is_neither(content, structured, shown):
    assert _text_of(CallToolResult(content=content, structured_content=structured)) == shown
