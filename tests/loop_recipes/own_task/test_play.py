"""Episodes that are played without a model: what is said, what nothing earns, and that the environment is closed."""

import asyncio

import pytest

from agent_environments.protocol import UnknownTask, create_pool
from loop_recipes.own_task.play import nothing, play_tasks, words_as_tokens
from support.tool_modules import PRODUCTS


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "products.py").write_text(PRODUCTS)
    return create_pool("tools", {"module": str(tmp_path / "products.py")}, words_as_tokens)


def call(value):
    return f'<tool_call>{{"name": "answer", "arguments": {{"value": {value}}}}}</tool_call>'


def test_nothing_is_done(pool):
    ended = []
    first, second = asyncio.run(play_tasks(pool, lambda: ["product2", "product3"], nothing, ended.append))
    assert ended == [first, second]
    assert [message.role for message in first.messages] == ["system", "user"]
    assert (first.task_id, first.turns, first.grade.reward, second.turns) == ("product2", 0, 0.0, 0)


def test_an_episode_goes_on_until_the_environment_ends_it(pool):
    said = ["hm", call(74), call(1)]
    (played,) = asyncio.run(play_tasks(pool, lambda: ["product2"], lambda messages: said.pop(0)))
    assert [message.role for message in played.messages[2:]] == ["assistant", "user", "assistant", "user"]
    assert "there is no tool call" in played.messages[3].content
    assert (played.turns, played.grade.success, said) == (2, True, [call(1)])


def test_the_pool_is_closed_whatever_happens(pool):
    with pytest.raises(UnknownTask):
        asyncio.run(play_tasks(pool, lambda: ["product2", "nosuch"], nothing))
    assert pool.status().open_worlds == 0


def test_words_are_cut_like_tokens():
    assert words_as_tokens("two  words\n") == [(0, 5), (5, 11)]
