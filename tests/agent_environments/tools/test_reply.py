"""Modules whose moves are plain text: a reply, or the first turn as the answer."""

import pytest

from agent_environments.conformance import check_conformance
from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.protocol import EnvironmentTimeout, Message
from agent_environments.tools import reply
from agent_environments.tools.environment import ToolPool
from agent_environments.tools.tool import ToolError
from loop_plumbing.deadline import Raised
from support.adapter_support import word_spans
from support.episodes import open_pool
from support.texts import texts_beside
from support.tool_modules import call, write

TEXTS = texts_beside(__file__)
ECHO = TEXTS["echo"]

QUESTIONS = TEXTS["questions"]


async def play(pool, task, *actions):
    """The opening messages, the results of the actions, and the grade."""
    environment = GuardedEnvironment(await pool.acquire("test"))
    try:
        opening = await environment.start(task)
        return opening, [await environment.step(action) for action in actions], await environment.grade()
    finally:
        await environment.close()


@pytest.fixture
async def echo(tmp_path):
    async with open_pool(ToolPool(word_spans, write(tmp_path, ECHO), max_worlds=1, observation_max_tokens=50)) as pool:
        yield pool


async def test_text_is_a_move_and_none_ends_the_episode(echo):
    opening, results, grade = await play(echo, "talk_1", "one", call("two"), "bye")
    assert opening == [Message("user", "Say something.")]
    assert [result.observation for result in results] == ["1: one", f"2: {call('two')}", ""]
    assert [result.done for result in results] == [False, False, True]
    assert not any(result.empty_action for result in results)
    assert grade.success


async def test_the_next_episode_begins_anew(echo):
    await play(echo, "talk_1", "one", "two")
    _, (result,), grade = await play(echo, "talk_2", "one")
    assert (result.observation, grade.reward) == ("1: one", pytest.approx(1 / 3))


async def test_a_long_reply_is_cut(echo):
    _, (result,), _ = await play(echo, "talk_1", "word " * 1000)
    assert 40 <= len(word_spans(result.observation)) < 80


async def test_a_reply_that_raises_ends_the_episode_and_is_told(echo, tmp_path):
    _, (_, result), grade = await play(echo, "talk_1", "one", "raise")
    assert (result.done, grade.reward) == (True, pytest.approx(2 / 3))
    assert grade.broke.what == f"KeyError: 'raise' ({tmp_path / 'mine.py'}:17)"


async def test_a_reply_that_ends_its_process_leaves_nothing_to_grade(echo):
    _, _, grade = await play(echo, "talk_1", "leave")
    assert "its process ended with status 3" in grade.broke.what
    assert "the instance is gone" in grade.ungradable
    assert (await play(echo, "talk_1", "one"))[2].reward


async def test_a_reply_that_hangs_ends_the_episode(tmp_path, monkeypatch):
    source = ECHO.replace("self.heard.append(text)", "time.sleep(3600)")
    monkeypatch.setattr("agent_environments.tools.environment.DEADLINE_S", 0.2)
    monkeypatch.setattr("loop_plumbing.forked_process.KILL_AFTER_S", 0.2)
    async with open_pool(ToolPool(word_spans, write(tmp_path, source), max_worlds=1)) as pool:
        with pytest.raises(EnvironmentTimeout, match="reply said took longer than"):
            await play(pool, "talk_1", "one")


async def test_a_pool_of_replies_keeps_to_the_protocol(echo):
    await check_conformance(echo, "talk_1")


async def test_beside_tools_a_reply_answers_the_turns_without_a_call(tmp_path):
    tool = '@tool(terminal=True)\n    def stop(self) -> str:\n        """Stop."""\n        return "."\n\n    @reply'
    pool = ToolPool(
        word_spans, write(tmp_path, ECHO.replace("@reply", tool).replace("import reply", "import tool, reply"))
    )
    assert pool.module.moves == "calls of stop; a turn without one is answered by said"
    await pool.open()
    opening, results, _ = await play(pool, "talk_1", "one", call("stop"))
    assert '"name": "stop"' in opening[0].content
    assert [result.observation for result in results] == ["1: one", "<tool_response>\n.\n</tool_response>"]
    assert [result.done for result in results] == [False, True]
    await pool.close()


async def test_without_tools_and_reply_the_first_turn_is_the_answer(tmp_path):
    pool = ToolPool(word_spans, write(tmp_path, QUESTIONS))
    assert pool.module.moves == "its text is the answer"
    await pool.open()
    opening, (result,), grade = await play(pool, "capital_1", f"Paris, and no {call('tool')}")
    assert opening == [Message("user", "What is the capital of France?")]
    assert (result.done, grade.success) == (True, True)
    assert not (await play(pool, "capital_1"))[2].reward
    await check_conformance(pool, "capital_1")
    await pool.close()


def test_a_reply_is_still_the_function(alarm):
    @reply
    def said(text):
        return {"heard": text}

    assert said("x") == {"heard": "x"}
    assert said.run("x", None) == '{"heard":"x"}'
    with pytest.raises(ToolError, match="its result cannot be shown"):
        reply(lambda text: b"\xff").run("x", None)
    with pytest.raises(Raised, match="ZeroDivisionError"):
        reply(lambda text: 1 / 0).run("x", None)
