"""AgentGym's own clients, subclasses of its ``BaseEnvClient``, on our server.

Optional: the package is not to be had from PyPI (``agentenv`` there is another one), so AGENTGYM_SOURCE names the
folder ``agentenv`` in a checkout of https://github.com/WooooDyy/AgentGym.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from yarl import URL

from agent_environments.counter import TARGETS, CounterPool
from loop_contrib.services.server import EnvironmentServer

SOURCE = os.environ.get("AGENTGYM_SOURCE", "")
PROGRAM = Path(__file__).parents[3] / "tests" / "contrib_support" / "agentgym_client.py"
TOKEN = "a-token"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (Path(SOURCE) / "agentenv").is_dir(), reason="AGENTGYM_SOURCE names no checkout of AgentGym"
    ),
]


class CommandPool(CounterPool):
    """A counter played by bare commands: these clients send no more of a message than what follows ``Action:``."""

    async def acquire(self, episode_id):
        environment = await super().acquire(episode_id)
        step = environment.step

        async def step_by_command(command):
            name, _, arguments = command.partition(" ")
            return await step(f"```python\n{name}({arguments})\n```")

        environment.step = step_by_command
        return environment


@pytest.mark.parametrize(("module", "kind"), [("textcraft", "TextCraftEnvClient"), ("babyai", "BabyAIEnvClient")])
async def test_agentgyms_client_on_our_server(module, kind):
    pool = CommandPool(lambda text: [])
    async with TestServer(EnvironmentServer(pool, ["train"], TOKEN).application()) as server:
        url = str(URL(str(server.make_url(""))).with_user("agentgym").with_password(TOKEN)).rstrip("/")
        index = list(TARGETS["train"]).index("reach5_1")
        actions = [f"Thought:\nI count.\n\nAction:\n{command}" for command in ("add 3", "show", "add 2", "finish")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), SOURCE, module, kind, url, str(index), *actions),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        seen = json.loads(output)
        assert seen["opening"].endswith("Bring the counter from 0 to 5.")
        assert [step[1:] for step in seen["steps"]] == [[0.0, False], [0.0, False], [0.0, False], [1.0, True]]
        assert seen["steps"][1][0].startswith("3")
        assert seen["observed"] == seen["steps"][-1][0]
    assert pool.status().open_worlds == 0
