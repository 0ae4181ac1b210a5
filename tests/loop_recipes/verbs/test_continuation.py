"""Going on from a turn, and turn values: the viewer's HTTP face on a run whose node is alive, and where none is."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from loop_formats.collection_request import Limits
from loop_formats.run_files import read_rollouts
from loop_recipes.verbs import continuation
from loop_viewer.app import build_app
from loop_viewer.run_data import RunData
from support.counter_node import TOKEN, counter_request, local_node
from support.viewer_run import write_values
from support.waiting import DEADLINE_S

LIMITS = Limits(max_turns=4, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=DEADLINE_S)
COLLECTION = "demo-i0001"
BRANCH = f"/api/collections/{COLLECTION}/rollouts/1/turns"


@pytest.fixture
async def running(policy, tmp_path, monkeypatch):
    """The node of a run in ``tmp_path``, with one rollout of four turns."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", TOKEN)
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.speak = lambda rng: "```python\nadd(1)\n```"
        await local.collect(counter_request(COLLECTION, tasks=["reach8_1"], rollouts_per_task=1, limits=LIMITS))
        local.node.write_address(local.url, os.getpid())
        yield local


@contextlib.asynccontextmanager
async def viewer(folder: Path):
    async with TestClient(TestServer(build_app(RunData(folder), continuation))) as client:
        yield client


async def refusal(client, turn=2):
    return (await (await client.post(f"{BRANCH}/{turn}/branch", json={})).json())["error"]


async def ended(client, collection):
    async with asyncio.timeout(DEADLINE_S):
        while True:
            state = await (await client.get(f"/api/branches/{collection}")).json()
            if state["ended"]:
                return state
            await asyncio.sleep(0.05)


async def test_a_turn_is_gone_on_from(running, tmp_path):
    async with viewer(tmp_path) as client:
        running.vllm.speak = lambda rng: "```python\nfinish()\n```"
        collections = []
        for _ in range(2):
            answer = await client.post(f"{BRANCH}/2/branch", json={})
            assert answer.status == 200, await answer.text()
            collections.append((await answer.json())["collection"])
            assert await ended(client, collections[-1]) == {"ended": True, "error": None}
        assert len(set(collections)) == 2, "each time another continuation"
        shown = await (await client.get(f"/api/collections/{collections[0]}/rollouts/1")).json()
        origin = {"rollout_id": f"{COLLECTION}/reach8_1/0.0", "turns": 2, "collection": COLLECTION, "cursor": 1}
        assert shown["branch_of"] == origin
        assert (shown["end_reason"], len(shown["turns"]), shown["values"]) == ("completed", 1, None)
        overview = await (await client.get("/api/run")).json()
        assert {item["id"] for item in overview["collections"]} == {COLLECTION, *collections}


async def test_what_cannot_be_gone_on_from_is_said_in_one_line(running, tmp_path, monkeypatch):
    async with viewer(tmp_path) as client:
        assert "sampled turns 0 to 3, not turn 4" in await refusal(client, turn=4)
        assert (await client.post(f"{BRANCH}/2/branch", data="{}")).status == 415
        monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "another")
        assert "start run and viewer with the same ROLLOUT_SERVER_TOKEN" in await refusal(client)
        running.node.remove_address()
        assert (await refusal(client)).startswith("no rollout node of this run is running on this machine")
        running.node.write_address("http://127.0.0.1:9", 1)  # the address of one that was killed
        assert (await refusal(client)).startswith("no rollout node at http://127.0.0.1:9")


async def test_a_branch_that_was_refused_says_why(running, tmp_path):
    log = running.node.root / "collections" / f"{COLLECTION}.jsonl"
    text = log.read_text()
    log.write_text(text.replace("Execution successful.", "Nothing happened.", 1))
    async with viewer(tmp_path) as client:
        collection = (await (await client.post(f"{BRANCH}/2/branch", json={})).json())["collection"]
        state = await ended(client, collection)
    assert state["error"].startswith(f"turn 0 of {COLLECTION}/reach8_1/0.0 is answered otherwise")


async def test_values_are_shown_beside_their_turns(running, tmp_path):
    (rollout,) = read_rollouts(running.node.root / "collections" / f"{COLLECTION}.jsonl")
    assert RunData(tmp_path).rollout(COLLECTION, 1)["values"] is None
    write_values(tmp_path, rollout, {0: [1.0, 0.0], 2: [0.5, 1.0]})
    values = RunData(tmp_path).rollout(COLLECTION, 1)["values"]
    assert [value and (value["turn"], value["value"], value["n"]) for value in values] == [
        (0, 0.5, 2),
        None,
        (2, 0.75, 2),
        None,
    ]
