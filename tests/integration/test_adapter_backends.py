"""The forked worlds against the stock engine over HTTP: the same text and the same grades, and where they must differ.

The reference solutions are played on both: of a hardest task of each set of apps that tasks use together, and, as a
drill, of every task of the synthetic world, which takes minutes.
"""

from __future__ import annotations

import json
import re

import pytest
import pytest_asyncio

from support.adapter_support import (
    ROOT,
    SPLITS,
    database_writing_code,
    fenced,
    make_pool,
    needs_world,
    no_op_reward,
    play,
    solution_steps,
    volume_task,
)
from support.episodes import begun_episode, open_pool
from support.texts import texts_beside

TABLES = texts_beside(__file__)

pytestmark = [pytest.mark.integration, needs_world, pytest.mark.asyncio(loop_scope="session")]

TOKEN_SIGNATURE = re.compile(r"(eyJ[\w-]+\.[\w-]+)\.[\w-]+")

PROGRAMS = TABLES["programs"]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def stock():
    async with open_pool(make_pool("support.stock_engine:HttpPool", max_worlds=1)) as stock:
        yield stock


async def both(pool, stock, task_id, steps):
    """What each backend showed, without the signatures of tokens (the forked worlds have a key of their own)."""
    found = []
    for backend in (pool, stock):
        results, grade = await play(backend, task_id, steps)
        found.append(([TOKEN_SIGNATURE.sub(r"\1", result.observation) for result in results], grade))
    return found


async def test_same_text(pool, stock):
    card, _ = volume_task()
    (ours, _), (theirs, _) = await both(pool, stock, card.task_id, list(PROGRAMS))
    for program, one, other in zip(PROGRAMS, ours, theirs, strict=True):
        assert one == other, program


async def compare(pool, stock, tasks):
    assert tasks
    for task in tasks:
        ours, theirs = await both(pool, stock, task, ["\n".join(solution_steps(task))])
        assert ours == theirs, task
        assert ours[1].success, task


def all_tasks(pool) -> list[str]:
    return [task for split in SPLITS for task in pool.tasks(split)]


def demonstration(task: str) -> dict:
    return json.loads((ROOT / "data" / "tasks" / task / "ground_truth" / "demonstration.json").read_text())


async def test_same_results_on_every_set_of_apps(pool, stock):
    found = {task: demonstration(task) for task in all_tasks(pool)}
    tasks = sorted(found, key=lambda task: found[task]["difficulty"])
    await compare(pool, stock, list({tuple(sorted(found[task]["apps"])): task for task in tasks}.values()))


@pytest.mark.drill
@pytest.mark.timeout(1800)
async def test_same_results_on_all_tasks(pool, stock):
    await compare(pool, stock, all_tasks(pool))


async def test_direct_database_writes_pay_on_the_stock_engine_and_not_here(pool, stock):
    card, volume = volume_task()
    code = database_writing_code(card, volume)
    _, theirs = await play(stock, card.task_id, [code])
    results, ours = await play(pool, card.task_id, [code, "apis.supervisor.complete_task()"])
    assert theirs.success
    assert results[0].failed
    assert ours.reward == no_op_reward(card.task_id)


async def test_a_stock_server_that_fails_is_not_used_again(stock):
    card, _ = volume_task()
    async with begun_episode(stock, card.task_id) as environment:
        before = {server.process.pid for server in stock._all}
        world = environment._world
        world._server.process.kill()
        assert (await environment.step(fenced("print('back')"))).observation.startswith("back")
        assert environment._world._server.process.pid not in before
    assert world._server not in stock._all
