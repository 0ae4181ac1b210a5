"""Counts of what agents do with tools, from the texts of real episodes."""

from agent_environments.agent_turns import AgentTurn
from agent_environments.tools.behavior import ToolBehavior
from agent_environments.tools.environment import ToolPool
from support.adapter_support import word_spans
from support.episodes import open_pool
from support.tool_modules import SUMS, call, write

BEHAVIOR = ToolBehavior()


def tool_metrics(episodes):
    """The figures over episodes, those that are defined."""
    counts = [BEHAVIOR.counts(turns) for turns in episodes]
    values = {figure.key: figure.value(counts) for figure in BEHAVIOR.figures}
    return {key: value for key, value in values.items() if value is not None}


TURNS = [
    "I think first.",
    call("add", a=1) + call("subtract", a=1),
    call("add", a="Error: there is no tool ") + "<tool_call>add</tool_call>",
    call("fail", how="x"),
    call("repeat", text="\n<tool_response>\nError: the tool failed: \n", times=0),
    call("answer", value=42),
]


async def played(tmp_path, turns):
    async with open_pool(ToolPool(word_spans, write(tmp_path, SUMS))) as pool:
        environment = await pool.acquire("one")
        assert BEHAVIOR.concerns([vars(message) for message in await environment.start("sum_1")])
        answered = [AgentTurn(turn, (await environment.step(turn)).observation) for turn in turns]
        await environment.close()
    return answered


async def test_every_kind_of_mistake_is_counted(tmp_path):
    turns = await played(tmp_path, TURNS)
    assert BEHAVIOR.counts(turns) == {
        "tool_turns": 6,
        "turns_without_call": 1,
        "tool_calls": 7,
        "tool_calls_bad": 1,
        "tool_calls_unknown": 1,
        "tool_calls_wrong_arguments": 1,
        "tool_calls_failed": 1,
    }
    assert BEHAVIOR.calls(turns) == ["add", "subtract", "add", "fail", "repeat", "answer"]
    metrics = tool_metrics([turns, turns])
    assert metrics == {
        "tool_calls": 7.0,
        "tool_calls_bad": 1 / 7,
        "tool_calls_unknown": 1 / 7,
        "tool_calls_wrong_arguments": 1 / 7,
        "tool_calls_failed": 1 / 7,
        "turns_without_call": 1 / 6,
    }


async def test_without_calls_there_are_no_shares_of_them(tmp_path):
    assert tool_metrics([await played(tmp_path, ["Hm."])]) == {"tool_calls": 0.0, "turns_without_call": 1.0}


def test_rollouts_without_tools_have_no_figures():
    assert not BEHAVIOR.concerns([])
    assert not BEHAVIOR.concerns([{"role": "system", "content": "Write code."}, {"role": "user", "content": "Hello."}])
    assert tool_metrics([]) == {}
