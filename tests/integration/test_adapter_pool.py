"""The pool on the real engine: honest episodes, deadlines, crashes of every process, and what is left after the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_environments.protocol import (
    Environment,
    EnvironmentCrashed,
    EnvironmentPool,
    EnvironmentTimeout,
    UnknownTask,
)
from loop_plumbing.agent_timeout import AgentTimeout
from support.adapter_support import (
    PYTHON,
    REPOSITORY,
    ROOT,
    fenced,
    honest_code,
    make_pool,
    needs_world,
    no_op_reward,
    play,
    volume_task,
)
from support.episodes import begun_episode, open_pool
from support.processes import busy, episode_processes, processes
from support.texts import texts_beside
from support.waiting import block_until, wait_until

pytestmark = [pytest.mark.integration, needs_world]
session_loop = pytest.mark.asyncio(loop_scope="session")

REMEMBER = "remembered = 'still here'"
RECALL = "print(remembered)"


@session_loop
async def test_honest_episode_is_paid_in_full(pool):
    assert isinstance(pool, EnvironmentPool)
    card, volume = volume_task()
    environment = await pool.acquire("collection/volume/0.0")
    assert isinstance(environment, Environment)
    messages = await environment.start(card.task_id)
    assert card.instruction in messages[-1].content
    result = await environment.step(fenced(honest_code(card, volume)))
    assert (result.done, result.failed, result.empty_action) == (True, False, False)
    assert "As a reminder" not in result.observation
    grade = await environment.grade()
    assert (grade.reward, grade.success) == (1.0, True)
    assert any(requirement.no_op_pass for requirement in grade.requirements)
    await environment.close()


@session_loop
async def test_doing_nothing_is_worth_what_the_dataset_says(pool):
    card, _ = volume_task()
    _, grade = await play(pool, card.task_id, [])
    assert (grade.reward, grade.success) == (no_op_reward(card.task_id), False)


@session_loop
async def test_variables_last_and_text_is_the_engines(pool):
    card, _ = volume_task()
    steps = [REMEMBER, RECALL, "1 / 0", "for", "apis.nope.x()", "print([1, 2])"]
    results, _ = await play(pool, card.task_id, steps)
    shown = [result.observation.partition("\nAs a reminder\n\n")[0] for result in results]
    assert shown[0] == "Execution successful."
    assert shown[1] == "still here\n"
    assert shown[2].startswith('Execution failed. Traceback:\n  File "<python-input>", line 1, in <module>\n')
    assert shown[2].endswith("ZeroDivisionError: division by zero")
    assert shown[3].startswith("Execution failed. Traceback:\nSyntax error in line:\nfor")
    assert shown[4].endswith("Exception: No app named 'nope' found.")
    assert shown[5] == "[1, 2]\n"
    assert [result.failed for result in results] == [False, False, True, True, True, False]
    async with begun_episode(pool, card.task_id) as environment:
        result = await environment.step("I have no idea.")
        assert result.empty_action
        assert result.observation.startswith("No code available to execute.\nAs a reminder")


@session_loop
async def test_unknown_names(pool):
    environment = await pool.acquire("unknown")
    with pytest.raises(UnknownTask, match="nope_1"):
        await environment.start("nope_1")
    await environment.close()
    with pytest.raises(UnknownTask, match="there are"):
        pool.tasks("nope")


@session_loop
async def test_the_engines_alarm_leaves_the_episode_alive(unguarded):
    card, _ = volume_task()
    seconds = int(unguarded.execute_timeout_s)
    results, _ = await play(unguarded, card.task_id, [REMEMBER, "while True: pass", RECALL])
    assert f"Execution timed out after {seconds} seconds." in results[1].observation
    assert results[2].observation.startswith("still here")


@session_loop
@pytest.mark.parametrize("solved", [False, True])
async def test_a_hang_is_killed_and_its_state_graded(pool, solved, short_grace, monkeypatch):
    """Solved in the very program that hangs, too: nobody looks, and undoes."""
    card, volume = volume_task()
    async with begun_episode(pool, card.task_id) as environment:
        code, hang = honest_code(card, volume), "sum(range(10**12))"
        if solved:
            hang = f"{code}\n{hang}"
        else:
            await environment.step(fenced(code.replace("apis.supervisor.complete_task()", "")))
        # Shorter than the engine's alarm, which would not end this either; but long enough to solve the task.
        monkeypatch.setattr(pool, "execute_timeout_s", 9.0 if solved else 1.0)
        with pytest.raises(EnvironmentTimeout, match="the world ran its code for"):
            await environment.step(fenced(hang))
        with pytest.raises(EnvironmentCrashed, match="no world"):
            await environment.step(fenced("print(1)"))
        grade = await environment.grade()
        assert (grade.reward, grade.success) == (1.0, True) if solved else no_op_reward(card.task_id) < grade.reward < 1


@session_loop
async def test_code_that_kills_its_interpreter_ends_its_episode(pool):
    card, _ = volume_task()
    results, grade = await play(pool, card.task_id, [REMEMBER, "import os\nos.abort()", RECALL])
    assert len(results) == 2
    assert results[1].done
    assert results[1].observation.startswith("Execution failed. Traceback:\nThe interpreter ended")
    assert grade.reward == no_op_reward(card.task_id)


@session_loop
async def test_an_episode_whose_time_ends_in_a_step_is_graded(pool):
    card, _ = volume_task()
    async with begun_episode(pool, card.task_id) as environment:

        async def overrun():
            async with AgentTimeout(1.0).running():
                await environment.step(fenced("while True: pass"))

        with pytest.raises(TimeoutError):
            await overrun()
        assert (await environment.grade()).ungradable is None


@session_loop
async def test_a_cancelled_step_leaves_nothing(pool):
    card, _ = volume_task()
    before = set(processes(str(pool.run_folder.path)))
    async with begun_episode(pool, card.task_id) as environment:
        hang = "while True:\n    try: sum(range(10**12))\n    except: pass"
        step = asyncio.create_task(environment.step(fenced(hang)))
        await wait_until(lambda: busy(episode_processes(pool._servers["world"].pid)))
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
    await wait_until(lambda: set(processes(str(pool.run_folder.path))) <= before)
    assert list((pool.run_folder.agent / "experiments" / "outputs").iterdir()) == []


OWNER = texts_beside(__file__)["owner"]


def test_nothing_outlives_a_killed_owner(tmp_path_factory):
    base = tmp_path_factory.mktemp("b")
    program = OWNER.format(tests=str(Path(__file__).parents[1]), base=str(base))
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert owner.stdout is not None
    folder = Path(json.loads(owner.stdout.readline()))
    block_until(lambda: len(processes(str(folder))) >= 5)
    owner.kill()
    owner.wait()
    block_until(lambda: not processes(str(folder)))
    # The folder goes when the next pool opens there, if not before.
    from appworld_adapter.pool.run_folder import WorldFolder

    fresh = WorldFolder.create(str(base), ROOT, keep=False)
    assert not folder.exists()
    fresh.remove()
    assert list(fresh.path.parent.iterdir()) == []


@session_loop
async def test_bad_options_are_refused_before_work_begins(tmp_path):
    with pytest.raises(ValueError, match="sandbox_minimum"):
        make_pool(sandbox_minimum="docker")
    with pytest.raises(ValueError, match="experiments_root"):
        make_pool(keep_experiments=True)
    with pytest.raises(ValueError, match="max_world"):
        make_pool(max_world=3)
    with pytest.raises(FileNotFoundError, match="make world"):
        make_pool(root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make setup"):
        await make_pool(python=str(tmp_path / "python")).open()
    with pytest.raises(EnvironmentCrashed, match="ModuleNotFoundError: No module named"):
        await make_pool(python=sys.executable).open()
    assert sys.executable != PYTHON


@session_loop
async def test_kept_experiments_are_kept(tmp_path_factory):
    base = tmp_path_factory.mktemp("k")
    async with open_pool(make_pool(max_worlds=1, keep_experiments=True, experiments_root=str(base))) as pool:
        card, _ = volume_task()
        await play(pool, card.task_id, ["print(1)", "print(apis.supervisor.show_profile(), '\\ud800')"])
    (logs,) = base.glob(f"*/run-*/agent/experiments/outputs/*/tasks/{card.task_id}/logs")
    assert "### Environment Interaction 2" in (logs / "environment_io.md").read_text()
    (call,) = map(json.loads, (logs / "api_calls.jsonl").read_text().splitlines())
    assert call["url"].endswith("/supervisor/profile")
    assert list(base.glob(f"*/run-*/agent/experiments/outputs/*/tasks/{card.task_id}/dbs/supervisor.jsonl"))
