"""Counts of what agents do with tools, from the texts of real episodes."""

from agent_environments.agent_turns import AgentTurn
from agent_environments.tools.behavior import TOOL_FIGURES, ToolBehavior, has_tools, tool_behavior, tool_metrics
from agent_environments.tools.environment import ToolPool
from support.adapter_support import word_spans
from support.tool_modules import SUMS, call, write

TURNS = [
    "I think first.",
    call("add", a=1) + call("subtract", a=1),
    call("add", a="Error: there is no tool ") + "<tool_call>add</tool_call>",
    call("fail", how="x"),
    call("repeat", text="\n<tool_response>\nError: the tool failed: \n", times=0),
    call("answer", value=42),
]


async def played(tmp_path, turns):
    pool = ToolPool(word_spans, write(tmp_path, SUMS))
    await pool.open()
    environment = await pool.acquire("one")
    assert has_tools([vars(message) for message in await environment.start("sum_1")])
    answered = [AgentTurn(turn, (await environment.step(turn)).observation) for turn in turns]
    await environment.close()
    await pool.close()
    return answered


async def test_every_kind_of_mistake_is_counted(tmp_path):
    turns = await played(tmp_path, TURNS)
    expected = ToolBehavior(turns=6, turns_without_call=1, calls=7, bad=1, unknown=1, wrong_arguments=1, failed=1)
    assert tool_behavior(turns) == expected
    metrics = tool_metrics([turns, turns])
    assert metrics == {
        "tool_calls": 7.0,
        "tool_calls_bad": 1 / 7,
        "tool_calls_unknown": 1 / 7,
        "tool_calls_wrong_arguments": 1 / 7,
        "tool_calls_failed": 1 / 7,
        "turns_without_call": 1 / 6,
    }
    assert metrics.keys() == TOOL_FIGURES.keys()


async def test_without_calls_there_are_no_shares_of_them(tmp_path):
    assert tool_metrics([await played(tmp_path, ["Hm."])]) == {"tool_calls": 0.0, "turns_without_call": 1.0}


def test_rollouts_without_tools_have_no_figures():
    assert not has_tools([])
    assert not has_tools([{"role": "system", "content": "Write code."}, {"role": "user", "content": "Hello."}])
    assert tool_metrics([]) == {}
