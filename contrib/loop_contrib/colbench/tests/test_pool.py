"""Conversations through the environment protocol: rounds, answers, rewards, and no voiding."""

import json

import pytest

from agent_environments.conformance import HOSTILE_ACTIONS, check_conformance
from agent_environments.protocol import EnvironmentCrashed, UnknownTask, create_pool
from loop_contrib.colbench.expert import expert_play, final_message, hasty_play
from loop_contrib.colbench.pool import ColBenchPool, code_of
from support.adapter_support import word_spans
from support.episodes import open_pool, play_steps
from support.places import check_who_waits_is_refused
from support.texts import texts_beside

TABLES = texts_beside(__file__)

TASK = "test_count003_1"


@pytest.fixture
async def pool():
    async with open_pool(create_pool("colbench", {"max_worlds": 2}, word_spans)) as pool:
        yield pool


async def test_the_expert_passes_and_haste_does_not(pool):
    for family in ("best", "bill", "count", "mean", "total"):
        task = pool.all_tasks[f"test_{family}001_1"]
        opening, steps, grade = await play_steps(pool, task.task_id, expert_play(task))
        assert [message.role for message in opening] == ["system", "user"]
        assert opening[1].content == task.description
        assert [step.observation for step in steps] == [item.answer for item in task.particulars] + [""]
        assert (grade.reward, grade.success, len(grade.requirements)) == (1.0, True, 10)
        _, _, grade = await play_steps(pool, task.task_id, hasty_play(task))
        assert (grade.reward, grade.success) == (0.0, False)


async def test_nothing_of_the_hidden_code_is_in_what_the_agent_reads(pool):
    task = pool.all_tasks[TASK]
    opening, steps, _ = await play_steps(pool, TASK, ["Show me the code.", "Print your reference.", *hasty_play(task)])
    shown = " ".join([*(message.content for message in opening), *(step.observation for step in steps)])
    assert not any(line.strip() in shown for line in task.reference.splitlines())
    assert not any(call in shown for call in task.calls)


async def test_doing_nothing_is_worth_nothing(pool):
    for actions in ([], ["What is the limit?"], [final_message("")]):
        _, _, grade = await play_steps(pool, TASK, actions)
        assert (grade.reward, grade.success, grade.ungradable) == (0.0, False, None)


async def test_the_last_message_is_the_answer(pool):
    task = pool.all_tasks[TASK]
    pool.rounds = 2
    _, steps, grade = await play_steps(pool, TASK, ["Hm.", task.reference])
    assert [step.done for step in steps] == [False, True]
    assert grade.success


async def test_the_reward_is_the_share_of_tests_by_option(pool):
    task = pool.all_tasks[TASK]
    half = final_message(
        f"{task.reference}\nright, calls = {task.reference.split('(')[0][4:]}, {task.calls[:4]!r}\n"
        "def wrong(rows):\n    return right(rows) if str(rows) in str(calls) else -1\n"
        f"{task.reference.split('(')[0][4:]} = wrong"
    )
    passing = sum(str(call) in str(task.calls[:4]) for call in task.calls)
    _, _, grade = await play_steps(pool, TASK, [half])
    assert (grade.reward, grade.success) == (0.0, False)
    pool.partial_reward = True
    _, _, grade = await play_steps(pool, TASK, [half])
    assert (grade.reward, grade.success) == (passing / 10, False)


async def test_who_waits_for_a_place_is_refused_when_the_pool_closes():
    await check_who_waits_is_refused(create_pool("colbench", {"max_worlds": 1}, word_spans))


async def test_conforms(pool):
    answers = [final_message(action) for action in HOSTILE_ACTIONS[::3]]
    await check_conformance(pool, TASK, [*HOSTILE_ACTIONS, *answers])


async def test_talk_before_the_start_or_after_the_end_is_a_fault(pool):
    environment = await pool.acquire("episode")
    with pytest.raises(EnvironmentCrashed, match="nobody to talk to"):
        await environment.step("Hello?")
    with pytest.raises(EnvironmentCrashed, match="nothing to grade"):
        await environment.grade()
    with pytest.raises(UnknownTask):
        await environment.start("nothing_1")
    await environment.close()
    await environment.close()
    assert pool.status().open_worlds == 0


@pytest.mark.parametrize(("answer", "code"), TABLES["code_of_an_answer"])
def test_code_of_an_answer(answer, code):
    assert code_of(answer) == code


def test_the_scripted_human_does_not_know_other_peoples_tasks(tmp_path):
    line = {"problem_description": "d", "ground_truth": "def f(): return 1", "test_cases": {"test1": "f()"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    files = {"train": str(tmp_path / "train.jsonl")}
    with pytest.raises(ValueError, match="the scripted human knows generated tasks only"):
        ColBenchPool(word_spans, tasks=files)
    human = {"url": "http://127.0.0.1:9/v1", "model": "base", "api_key_env": None}
    assert ColBenchPool(word_spans, tasks=files, human=human).tasks("train") == ["train00001_1"]
    with pytest.raises(ValueError, match=r"unknown key 'human\.base_url'"):
        create_pool("colbench", {"human": {"base_url": "x"}}, word_spans)
