"""An environment that broke is told on the terminal, counted, and ends a run where it broke too often."""

import json
import logging
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from agent_environments.description import TOOLS_BEHAVIOR, Description
from loop_formats.rollout import Rollout, Turn
from loop_formats.run_files import read_rollouts
from loop_recipes.rollouts.broken import EnvironmentBroke, broken_lines, check_broken, hopeless_lines
from loop_recipes.rollouts.source import Collected, collect
from support.counter_node import counter_request
from support.fake_node import FixedNode, collected
from support.small_runs import in_sequences, replay_config, train, write_logs

STEP = {"where": "step", "what": "IndexError: list index out of range (/home/me/mine.py:12)"}
GRADE = {"where": "reward right", "what": "KeyError: 'x' (/home/me/mine.py:40)"}


@pytest.fixture
def rollouts(tmp_path):
    """Twelve."""
    return list(read_rollouts(write_logs(tmp_path / "made-up", 1, 300) / "made-up-i0001.jsonl"))


def breaking(rollouts, *broke):
    """The first of them as if their environments had broken."""
    return [replace(rollout, broke=how) for rollout, how in zip(rollouts, broke, strict=False)] + rollouts[len(broke) :]


def using(rollouts, *uses):
    return [
        replace(rollouts[0], tools=[dict(zip(("tool", "calls", "raised", "what"), use, strict=True)) for use in uses])
    ]


def test_one_line_says_how_often_and_in_what(rollouts):
    assert broken_lines(rollouts) == []
    said = (
        "the environment broke in 1 of 12 rollouts in step: IndexError: list index out of range (/home/me/mine.py:12)"
    )
    assert broken_lines(breaking(rollouts, STEP)) == [said]
    (line,) = broken_lines(breaking(rollouts, GRADE, STEP, GRADE))
    assert line == f"the environment broke in 3 of 12 rollouts, in 2 of them in reward right: {GRADE['what']}"


def test_an_episode_of_several_sequences_broke_once(rollouts):
    parts = [part for rollout in breaking(rollouts, STEP) for part in in_sequences(rollout)]
    assert broken_lines(parts) == broken_lines(breaking(rollouts, STEP))
    assert collected(parts).metrics()["broken_rollouts"] == 1


def test_a_tool_all_of_whose_calls_raised_is_told(rollouts):
    once = using(rollouts, ("add", 2, 2, "it fell"), ("show", 4, 3, "no"))
    assert broken_lines(once) == []
    more = once + using(rollouts, ("add", 1, 1, "it fell again"), ("show", 0, 0, ""))
    assert broken_lines(more) == ["all 3 calls of tool add raised: it fell"]


def test_a_share_above_the_stated_one_is_refused(rollouts):
    check_broken(breaking(rollouts, STEP, STEP, STEP), 0.25)
    check_broken(breaking(rollouts, *[STEP] * 12), 1.0)
    with pytest.raises(
        EnvironmentBroke, match=r"in 4 of 12 rollouts in step: .*mine.py:12\); .*max_broken_share \(0.25\)"
    ):
        check_broken(breaking(rollouts, *[STEP] * 4), 0.25)


def test_the_terminal_is_told_with_the_collection(rollouts, caplog):
    with caplog.at_level(logging.WARNING):
        collect(FixedNode(collected(breaking(rollouts, STEP))), counter_request())
    assert f"collection c1: {broken_lines(breaking(rollouts, STEP))[0]}" in caplog.text


def replying(rollouts, *replies, reward=0.0):
    return [
        replace(rollout, reward=reward, messages=[OFFER, {"role": "assistant", "content": reply}], turns=[TURN])
        for rollout, reply in zip(rollouts, replies, strict=False)
    ]


QUESTION = {"role": "user", "content": "Who are you?"}
OFFER = {"role": "system", "content": "Write calls within <tool_call></tool_call>."}
TURN = Turn(1, 2, 0, "stop", "s0", 0.1, 0.1, message=1)
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def test_rollouts_that_all_earn_the_same_are_told_with_three_replies(rollouts):
    tools = Description(behavior=(TOOLS_BEHAVIOR,))
    earned, call = hopeless_lines(replying(rollouts, "I", "I", "do not\nknow", "x" * 200, "how"), tools)
    shown = f"they end with: 'I' | 'do not know' | '{'x' * 120}...'"
    assert earned == f"the reward of all 5 rollouts is 0, so nothing can be learned of them; {shown}"
    assert call == f"no reply of 5 rollouts holds a call that could be read; {shown}"
    assert len(hopeless_lines(replying(rollouts, "I", CALL), tools)) == 1
    assert len(hopeless_lines(replying(rollouts, "I"), Description())) == 1
    (solved,) = hopeless_lines(replying(rollouts, CALL, CALL, reward=1.0), tools)
    assert solved.startswith("the reward of all 2 rollouts is 1, so nothing can be learned of them; they end with: ")
    assert hopeless_lines(replying(rollouts, "I") + replying(rollouts, "I", reward=0.5), tools) == []
    cut = [replace(one, turns=[replace(TURN, finish_reason="length")]) for one in replying(rollouts, "I")]
    earned, _ = hopeless_lines([*cut, *replying(rollouts, "I")], tools)
    assert "nothing can be learned of them (1 of 2 turns ran into max_tokens_per_turn); they end" in earned
    talk = [replace(one, messages=[QUESTION, *one.messages[1:]]) for one in replying(rollouts, "I")]
    assert len(hopeless_lines(talk, tools)) == 1  # no call was asked for


@pytest.mark.parametrize(("name", "told"), [("a-i0001-0123456789", True), ("a-i0002-0123456789", False), ("c1", False)])
def test_the_first_iteration_says_so(rollouts, name, told, caplog):
    with caplog.at_level(logging.WARNING):
        collect(FixedNode(collected(replying(rollouts, "I"))), replace(counter_request(), id=name))
    assert ("the reward of all 1 rollouts is 0" in caplog.text) == told


def test_what_broke_reaches_the_other_ranks_and_old_logs_have_none(rollouts):
    received = Collected.unpack(json.loads(json.dumps(collected(breaking(rollouts, STEP)).pack())))
    assert [rollout.broke for rollout in received.rollouts[:2]] == [STEP, None]
    old = {key: value for key, value in rollouts[0].to_dict().items() if key not in ("broke", "tools")}
    assert Rollout.from_dict(old) == rollouts[0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_a_run_goes_on_or_ends_in_its_first_iteration(tmp_path, rollouts, count, caplog):
    config = OmegaConf.load(replay_config(tmp_path, iterations=1))
    log = tmp_path / "logs/made-up-i0001.jsonl"
    log.write_text("".join(f"{rollout.to_json()}\n" for rollout in breaking(rollouts, *[STEP] * count)))
    if count == 4:
        with pytest.raises(EnvironmentBroke, match="in 4 of 12 rollouts in step: IndexError"):
            train(config)
        assert (tmp_path / "run/metrics.jsonl").read_text() == ""
    else:
        train(config)
        assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["broken_rollouts"] == 3
