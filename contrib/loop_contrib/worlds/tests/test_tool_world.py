"""Worlds that are played by tool calls: the policy's text on one side, lists of calls and results on the other."""

import json

import pytest

from agent_environments.agent_turns import AgentTurn
from agent_environments.protocol import Message
from agent_environments.tool_calls import ToolCall, render_tool_call
from agent_environments.tools.answer import NO_CALL
from agent_environments.tools.behavior import ToolBehavior
from loop_contrib.worlds.pool import WorldKind
from loop_contrib.worlds.tool_world import ToolWorldPool
from support.adapter_support import word_spans

SCHEMAS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("look", "done")
]


class Pool(ToolWorldPool):
    kind = WorldKind("fake", "never started")


@pytest.fixture
def pool():
    pool = Pool(word_spans, "python", observation_max_tokens=3)
    pool._learn({"splits": {"train": ["to_1"]}, "tools": SCHEMAS})
    return pool


def test_the_opening_offers_the_tools(pool):
    system, user = pool.opening({"instructions": "Work.", "observation": "Look around."})
    assert system.content.startswith("Work.\n\n# Tools\n")
    offered = system.content.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in offered] == SCHEMAS
    assert user == Message("user", "Look around.")


def test_a_command_and_its_message_are_one_another(pool):
    command = json.dumps([{"name": "look", "arguments": {"at": "</tool_call>"}}, {"name": "done", "arguments": {}}])
    assert pool.command(f"I look.\n{pool.message(command)}") == command
    assert pool.command("I think.") is None


def test_what_is_no_call_is_answered_and_counted(pool):
    turn = "\n".join(
        [
            render_tool_call(ToolCall("look", {})),
            "<tool_call>\n{look}\n</tool_call>",
            render_tool_call(ToolCall("jump", {})),
        ]
    )
    call, bad, unknown = json.loads(pool.command(turn))
    assert call == {"name": "look", "arguments": {}}
    pool = Pool(word_spans, "python")
    shown = pool.observation_text(json.dumps([{"error": "it is dark"}, bad, unknown]))
    assert shown.count("<tool_response>\nError: ") == 3
    assert "'jump'; there are look, done" in shown
    counted = ToolBehavior().counts([AgentTurn(turn, shown)])
    assert [counted[f"tool_calls{kind}"] for kind in ("", "_bad", "_unknown", "_failed")] == [3, 1, 1, 1]


def test_the_results_of_a_turn_are_cut_together():
    pool = Pool(word_spans, "python", observation_max_tokens=25)
    results = [{"result": "one"}, {"result": "two\n" * 20}, {"result": "three"}]
    shown = pool.observation_text(json.dumps(results))
    assert shown.startswith("<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\ntwo")
    assert shown.endswith("not fully shown.\n</tool_response>")
    assert "three" not in shown
    assert pool.observation_text(json.dumps(results[:1])) == "<tool_response>\none\n</tool_response>"


async def test_a_turn_without_a_call_is_told_so(pool):
    environment = await pool.acquire("")
    environment._task_id = "to_1"
    result = await environment.step("I think.")
    assert (result.observation, result.empty_action) == (NO_CALL, True)
    await environment.close()
