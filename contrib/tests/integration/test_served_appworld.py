"""AppWorld behind a service: the same episode as in process, with the grader's reward."""

import pytest
from aiohttp.test_utils import TestServer

from agent_environments.protocol import create_pool
from loop_contrib.services.server import EnvironmentServer
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from support.adapter_support import needs_world, word_spans
from support.episodes import open_pool, play_steps

TOKEN = "a-token"
ACTIONS = (
    "```python\nprint(apis.api_docs.show_app_descriptions())\n```",
    "no code",
    "```python\n1 / 0\n```",
    "```python\napis.supervisor.complete_task()\n```",
)


@pytest.mark.integration
@needs_world
@pytest.mark.asyncio(loop_scope="session")
async def test_a_served_episode_is_the_one_in_process(pool, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    async with TestServer(EnvironmentServer(pool, ["train", "dev"], TOKEN).application()) as server:
        url = str(server.make_url("")).rstrip("/")
        (task, *_) = pool.tasks("dev")
        expected = await play_steps(pool, task, ACTIONS)
        assert [step.done for step in expected[1]] == [False, False, False, True]
        for protocol in ("openenv", "agentgym"):
            async with open_pool(create_pool(protocol, {"url": url, "dataset": pool.dataset}, word_spans)) as service:
                assert await play_steps(service, task, ACTIONS) == expected
    assert pool.status().open_worlds == 0
