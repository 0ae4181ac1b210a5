"""OpenEnv's own client on our server, and our client on OpenEnv's own server.

The package has many dependencies, so these are drills, with an interpreter of its own: the one that OPENENV_PYTHON
names, or one that they make.
"""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from agent_environments.counter import TARGETS, CounterPool
from agent_environments.protocol import EnvironmentCrashed, create_pool
from loop_contrib.services.server import EnvironmentServer
from rollout_server.inference.server import free_port
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool
from support.interpreters import with_packages
from support.waiting import DEADLINE_S

PROGRAMS = Path(__file__).parents[3] / "tests" / "contrib_support" / "openenv_programs.py"
TOKEN = "a-token"

pytestmark = pytest.mark.drill


@pytest.fixture(scope="module")
def real():
    return with_packages("OPENENV_PYTHON", "openenv==0.10.0")


async def test_openenvs_client_on_our_server(real):
    pool = CounterPool(lambda text: [])
    async with TestServer(EnvironmentServer(pool, ["train"], TOKEN).application()) as server:
        index = list(TARGETS["train"]).index("reach5_1")
        actions = ["```python\nadd(3)\n```", "```python\nadd(2)\nfinish()\n```"]
        process = await asyncio.create_subprocess_exec(
            *(
                real,
                str(PROGRAMS),
                "client",
                str(server.make_url("")).rstrip("/"),
                TOKEN,
                "train",
                str(index),
                *actions,
            ),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        seen = json.loads(output)
        assert seen["steps"][0][0].endswith("Bring the counter from 0 to 5.")
        assert [step[1:] for step in seen["steps"]] == [[0.0, False], [0.0, False], [1.0, True]]
        assert seen["state"]["step_count"] == 2
        assert seen["state"]["grade"]["success"]
    assert pool.status().open_worlds == 0


@pytest.fixture
async def served(real, request):
    port = free_port()
    process = await asyncio.create_subprocess_exec(real, str(PROGRAMS), request.param, str(port))
    url = f"http://127.0.0.1:{port}"
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/health"):
                    break
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    yield url
    process.kill()
    await process.wait()


@pytest.mark.parametrize("served", ["guessing"], indirect=True)
async def test_our_client_on_openenvs_server(served):
    config = {"url": served, "dataset": "guessing", "action_field": "number", "observation_field": "hint"}
    async with open_pool(
        create_pool("openenv", {**config, "instructions": "Reply with a number."}, word_spans)
    ) as pool:
        assert pool.tasks("test") == ["test_0", "test_1", "test_2"]
        environment = await pool.acquire("episode")
        opening = await environment.start("test_2")
        assert [message.content for message in opening] == ["Reply with a number.", "Guess a number."]
        steps = [await environment.step(guess) for guess in ("5", "12")]
        assert [(step.observation, step.done) for step in steps] == [("More.", False), ("Yes.", True)]
        grade = await environment.grade()
        assert (grade.reward, grade.success) == (0.5, False)
        await environment.close()
        async with begun_episode(pool, "train_0", "episode") as environment:
            refused = await environment.step("no number")
            assert (refused.done, refused.failed, refused.broke) == (False, True, None)
            assert refused.observation.startswith(
                "Execution failed. Invalid message; number: Input should be a valid integer"
            )
            broken = await environment.step("-1")  # the environment's own error ends the episode in a grade
            assert (broken.done, broken.broke.what) == (True, "it has broken")
            assert (await environment.grade()).reward == 0.0


@pytest.mark.parametrize("served", ["tools"], indirect=True)
async def test_our_client_on_an_environment_of_mcp_tools(served):
    config = {"url": served, "dataset": "tools", "splits": {"train": [{}]}, "instructions": "Echo hi."}
    with pytest.raises(EnvironmentCrashed, match="no 'text': set observation_field to tool_name or result or error"):
        await create_pool("openenv", config, word_spans).open()
    async with open_pool(
        create_pool("openenv", {**config, "observation_field": "result", "action_field": None}, word_spans)
    ) as pool:
        environment = await pool.acquire("episode")
        assert [(message.role, message.content) for message in await environment.start("train_0")] == [
            ("user", "Echo hi.")
        ]
        said = [
            '{"type": "list_tools"}',
            '{"tool_name": "echo", "arguments": {"message": "hi"}}',
            '{"tool_name": "cry"}',
        ]
        listed, echoed, unknown = [await environment.step(each) for each in said]
        assert '"name": "echo"' in listed.observation
        assert echoed.observation == "hi"
        assert "Unknown tool: 'cry'" in unknown.observation
        refused = await environment.step('{"tool": "echo"}')
        assert "tool_name: Field required" in refused.observation
        assert (refused.done, refused.failed) == (False, True)
        await environment.close()
