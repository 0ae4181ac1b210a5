"""BFCL's multi-turn tasks: in a stand-in of the package, and the whole of the package in a drill."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_environments.conformance import check_conformance
from contrib_support.real_worlds import expert_messages
from loop_contrib.worlds.bfcl import BfclPool
from loop_contrib.worlds.pool import WorldKind
from support.adapter_support import word_spans
from support.episodes import open_pool, play_steps
from support.texts import texts_beside
from support.tool_modules import call

TABLES = texts_beside(__file__)

FAKE = Path(__file__).parents[3] / "tests" / "contrib_support" / "fake_bfcl"
KINDS = ("base", "long-context", "miss-func", "miss-param")


@dataclass(frozen=True)
class FakeKind(WorldKind):
    def environment(self):
        return {"PYTHONPATH": str(FAKE)}


class FakePool(BfclPool):
    kind = FakeKind(BfclPool.kind.name, BfclPool.kind.worker, cure=BfclPool.kind.cure)


@pytest.fixture
async def pool():
    async with open_pool(FakePool(word_spans, python=sys.executable, max_worlds=2)) as pool:
        yield pool


async def test_the_reference_solves_every_task_and_an_empty_turn_none(pool):
    for kind in KINDS:
        assert pool.tasks(kind) == [f"{kind}_7", f"{kind}_100"]
        messages = await expert_messages(pool, f"{kind}_7")
        _, steps, grade = await play_steps(pool, f"{kind}_7", messages)
        assert (grade.reward, grade.success, steps[-1].done) == (1.0, True, True)
        assert (await play_steps(pool, f"{kind}_7", ["Done."] * len(messages)))[2].reward == 0.0
    assert pool.tasks("train") == [f"{kind}_7" for kind in KINDS]
    assert pool.tasks("test") == [f"{kind}_100" for kind in KINDS]
    assert pool.description.group_of("long-context_7") == pool.description.group_of("base_7") != "base_7"


async def test_what_the_agent_reads(pool):
    opening, steps, _ = await play_steps(
        pool, "base_7", [call("look"), call("put", thing="nut", times=0), "Done.", call("put", thing="bolt"), "Done."]
    )
    schemas = [json.loads(line) for line in opening[0].content.splitlines() if line.startswith('{"type"')]
    assert [each["function"]["name"] for each in schemas] == ["put", "look"], "the task's own functions"
    assert schemas[0]["function"]["parameters"]["type"] == "object"
    assert schemas[0]["function"]["parameters"]["properties"]["times"]["type"] == "number"
    assert opening[1].content == "Put a nut there."
    assert [step.observation for step in steps] == [
        '<tool_response>\n{"things": ["old"]}\n</tool_response>',
        "<tool_response>\nError: the tool failed: nothing to put\n</tool_response>",
        "And two bolts.",
        '<tool_response>\n{"things": 2}\n</tool_response>',
        "The user has no more requests.",
    ]
    assert [step.failed for step in steps] == [False, True, False, False, False]


async def test_a_function_that_was_withheld_comes_with_a_message_of_the_user(pool):
    opening, steps, _ = await play_steps(pool, "miss-func_7", ["I cannot.", call("put", thing="nut"), "Done.", "Done."])
    assert '"name": "put"' not in opening[0].content
    assert '"name": "put"' in steps[0].observation
    assert steps[0].observation.endswith("There are more functions now.")
    assert '{"things": 2}' in steps[1].observation


@pytest.mark.parametrize("arguments", TABLES["names_that_are_none_are_never_evaluated"])
async def test_names_that_are_none_are_never_evaluated(pool, arguments):
    message = "<tool_call>\n" + json.dumps({"name": "put", "arguments": arguments}) + "\n</tool_call>"
    _, steps, grade = await play_steps(pool, "base_7", [message])
    assert "Error: the tool failed: name 'put' is not defined" in steps[0].observation
    assert grade.reward == 0.0


async def test_functions_of_nobody_and_of_other_services(pool):
    _, steps, _ = await play_steps(pool, "base_7", [call("exit"), call("now")])
    assert steps[0].observation.count("Error: there is no tool 'exit'; there are ") == 1
    assert "Error: " in steps[1].observation
    assert "'now'" in steps[1].observation


async def test_more_than_twenty_turns_for_a_request_have_failed(pool):
    right = await expert_messages(pool, "base_7")
    _, steps, grade = await play_steps(pool, "base_7", [call("look")] * 19 + right)
    assert grade.success, "twenty turns"
    _, steps, grade = await play_steps(pool, "base_7", [call("look")] * 21)
    assert (steps[19].done, steps[20].done, grade.reward) == (False, True, 0.0)


async def test_an_episode_that_is_cut_short_has_failed(pool):
    right = await expert_messages(pool, "base_7")
    assert not (await play_steps(pool, "base_7", right[:-1]))[2].success


async def test_the_protocol(pool):
    await check_conformance(pool, "base_7")


@pytest.fixture
def real_python(tmp_path):
    """An interpreter with the package, which it installs."""
    python = str(tmp_path / "venv/bin/python")
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    packages = ["bfcl-eval==2026.3.23", "mpmath==1.4.1"]
    subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--python", python, *packages], check=True)
    return python


@pytest.mark.drill
async def test_the_reference_solves_all_eight_hundred_of_the_package(real_python):
    pool = BfclPool(word_spans, python=real_python, max_worlds=2)
    await pool.open()
    places = asyncio.Semaphore(2)

    async def solved(task):
        async with places:
            return (await play_steps(pool, task, await expert_messages(pool, task)))[2].success

    try:
        found = {kind: await asyncio.gather(*map(solved, pool.tasks(kind))) for kind in KINDS}
        assert {kind: sum(each) for kind, each in found.items()} == dict.fromkeys(KINDS, 200)
        nothing = [(await play_steps(pool, f"{kind}_0", ["Done."] * 6))[2].reward for kind in KINDS]
        assert nothing == [0.0] * 4
    finally:
        await pool.close()
