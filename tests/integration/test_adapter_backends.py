"""The forked worlds against the engine itself, run directly: the same text and grades, and where they must differ.

The reference solutions are played on both: of a hardest task of each set of apps that tasks use together, and, as a
drill, of every task of the synthetic world, which takes minutes.
"""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from agent_environments.observation import observation
from appworld_adapter.pool.forked import environment_of
from appworld_adapter.prompt import TaskCard, task_lines
from support.adapter_support import (
    PYTHON,
    ROOT,
    SPLITS,
    database_writing_code,
    needs_world,
    no_op_reward,
    play,
    solution_steps,
    volume_task,
)
from support.texts import texts_beside

TABLES = texts_beside(__file__)

pytestmark = [pytest.mark.integration, needs_world, pytest.mark.asyncio(loop_scope="session")]

TOKEN_SIGNATURE = re.compile(r"(eyJ[\w-]+\.[\w-]+)\.[\w-]+")

PROGRAMS = TABLES["programs"]


async def stock(folder, plays):
    """What the engine shows of each task's steps, as (output, whether the task was then completed), and its verdict."""
    root = folder / "stock"
    root.mkdir()
    (root / "data").symlink_to(ROOT / "data")
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-c", TABLES["engine"]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment_of(root),
    )
    printed, _ = await process.communicate(json.dumps(plays).encode())
    return json.loads(printed.splitlines()[-1])


async def compare(pool, folder, plays):
    """Compare texts, without the signatures of tokens (the forked worlds have a key of their own), and grades."""
    assert plays
    for (task, steps), (outputs, verdict) in zip(plays, await stock(folder, plays), strict=True):
        results, grade = await play(pool, task, steps)
        reminder = task_lines(TaskCard.load(ROOT, task))
        shown = [
            observation(output, None if done else reminder, pool.observation_max_tokens, pool.token_spans)
            for output, done in outputs
        ]
        for step, ours, theirs in zip(steps, results, shown, strict=True):
            assert TOKEN_SIGNATURE.sub(r"\1", ours.observation) == TOKEN_SIGNATURE.sub(r"\1", theirs), step
        found = {(each.text, each.passed) for each in grade.requirements}
        judged = {(each["requirement"], kind == "passes") for kind in ("passes", "failures") for each in verdict[kind]}
        assert (grade.success, found) == (verdict["success"], judged), task


async def test_same_text(pool, tmp_path):
    card, _ = volume_task()
    await compare(pool, tmp_path, [(card.task_id, PROGRAMS)])


def solved(tasks):
    return [(task, ["\n".join(solution_steps(task))]) for task in tasks]


def all_tasks(pool) -> list[str]:
    return [task for split in SPLITS for task in pool.tasks(split)]


def demonstration(task: str) -> dict:
    return json.loads((ROOT / "data" / "tasks" / task / "ground_truth" / "demonstration.json").read_text())


async def test_same_results_on_every_set_of_apps(pool, tmp_path):
    found = {task: demonstration(task) for task in all_tasks(pool)}
    tasks = sorted(found, key=lambda task: found[task]["difficulty"])
    await compare(pool, tmp_path, solved({tuple(sorted(found[task]["apps"])): task for task in tasks}.values()))


@pytest.mark.drill
@pytest.mark.timeout(1800)
async def test_same_results_on_all_tasks(pool, tmp_path):
    await compare(pool, tmp_path, solved(all_tasks(pool)))


async def test_direct_database_writes_pay_on_the_stock_engine_and_not_here(pool, tmp_path):
    card, volume = volume_task()
    code = database_writing_code(card, volume)
    [(_, theirs)] = await stock(tmp_path, [(card.task_id, [code])])
    results, ours = await play(pool, card.task_id, [code, "apis.supervisor.complete_task()"])
    assert theirs["success"]
    assert results[0].failed
    assert ours.reward == no_op_reward(card.task_id)
