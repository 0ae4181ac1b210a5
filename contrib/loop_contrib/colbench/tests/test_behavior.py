"""Questions counted in the texts of real conversations."""

import pytest

from agent_environments.agent_turns import AgentTurn
from loop_contrib.colbench.behavior import QuestionBehavior
from loop_contrib.colbench.expert import expert_play, hasty_play
from loop_contrib.colbench.pool import ColBenchPool
from support.adapter_support import word_spans
from support.episodes import open_pool

BEHAVIOR = QuestionBehavior()


def question_metrics(episodes):
    """The figures over episodes, those that are defined."""
    counts = [BEHAVIOR.counts(turns) for turns in episodes]
    values = {figure.key: figure.value(counts) for figure in BEHAVIOR.figures}
    return {key: value for key, value in values.items() if value is not None}


@pytest.fixture
async def pool():
    async with open_pool(ColBenchPool(word_spans)) as pool:
        yield pool


async def talk(pool, task_id, messages):
    environment = await pool.acquire("episode")
    opening = await environment.start(task_id)
    assert BEHAVIOR.concerns([vars(message) for message in opening])
    turns = [AgentTurn(message, (await environment.step(message)).observation) for message in messages]
    await environment.close()
    return turns


async def test_questions_are_the_turns_before_the_answer(pool):
    task = pool.all_tasks["test_best001_1"]
    careful = await talk(pool, task.task_id, ["How are you?", *expert_play(task)])
    hasty = await talk(pool, task.task_id, hasty_play(task))
    metrics = question_metrics([careful, hasty])
    assert metrics == {"questions": 2.0, "questions_unknown": 0.25}


async def test_a_conversation_that_was_cut_off_has_the_questions_that_were_answered(pool):
    turns = await talk(pool, "test_best001_1", ["Who wins a tie?"])
    assert question_metrics([[*turns, AgentTurn("What is the field called?", None)]])["questions"] == 1.0


async def test_what_is_not_there_has_no_figure(pool):
    hasty = await talk(pool, "test_best001_1", hasty_play(pool.all_tasks["test_best001_1"]))
    assert question_metrics([hasty]) == {"questions": 0.0}
    assert question_metrics([]) == {}
    assert not BEHAVIOR.concerns([])
    assert not BEHAVIOR.concerns([{"role": "system", "content": "Write code."}])
