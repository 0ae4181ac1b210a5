"""Continuations and Monte-Carlo values of turns, from a node on the counter environment whose policy is a coin."""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from loop_contrib.turn_credit.turn_values import ValuedRollout, write_turn_values
from loop_contrib.turn_credit.turn_values_cli import main
from loop_formats.branch import Branch
from loop_formats.collection_request import Limits, Sampling
from loop_formats.run_files import find_logs
from loop_formats.turn_values import TurnValue, read_turn_values
from loop_recipes.rollouts.branching import HowToSample, continuation_request, read_continuations, stored_protocol
from loop_recipes.rollouts.node_source import NodeSource
from support.counter_node import TOKEN, counter_request, local_node
from support.waiting import COMMAND_S, DEADLINE_S

pytestmark = pytest.mark.slow

LIMITS = Limits(max_turns=4, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=DEADLINE_S)
ADD, FINISH = "```python\nadd(3)\n```", "```python\nfinish()\n```"


@pytest.fixture
async def coin(policy, tmp_path):
    """A node whose policy adds 3 or finishes, each in half of its turns."""
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.speak = lambda rng: rng.choice([ADD, FINISH])
        yield local


def source_of(local):
    return NodeSource(local.client, None, DEADLINE_S, COMMAND_S, lambda: False)


def how(continuations, **changes):
    return HowToSample(continuations, **{"policy_version": 0, "sampling": Sampling(), "limits": LIMITS, **changes})


async def adding(local, name="demo-i0001", rollouts=1):
    """Rollouts on reach6 that add in all four turns."""
    speak, local.vllm.speak = local.vllm.speak, lambda rng: ADD
    made, _ = await local.collect(counter_request(name, tasks=["reach6_1"], rollouts_per_task=rollouts, limits=LIMITS))
    local.vllm.speak = speak
    return made


@cache
def exact_value(counter, turns_left):
    """V of the coin on reach6, by recursion: a quarter for each requirement."""

    def reward(finished):
        return ((counter == 6) + (2 * counter > 6) + finished + 1) / 4

    if turns_left == 0:
        return reward(False)
    return 0.5 * reward(True) + 0.5 * exact_value(counter + 3, turns_left - 1)


async def test_values_are_those_of_the_known_policy(coin, tmp_path):
    (rollout,) = await adding(coin)
    wanted = ValuedRollout.every(rollout, 1, how(60))
    file = tmp_path / "values.jsonl"
    assert await coin.call(write_turn_values, source_of(coin), [wanted], file) == []
    values = read_turn_values(file)
    assert [(value.rollout_id, value.turn, value.n, value.refused) for value in values] == [
        (rollout.rollout_id, turn, 60, 0) for turn in range(4)
    ]
    for value in values:
        assert abs(value.value - exact_value(3 * value.turn, 4 - value.turn)) < 4 * value.stderr
    assert set(json.loads(file.read_text().splitlines()[0])) >= {"rollout_id", "turn", "value", "stderr", "n"}


async def test_what_is_sampled_is_never_asked_twice(coin, tmp_path):
    """Stopped after the first of three rollouts, then again when all is there, then for more continuations."""
    rollouts = await adding(coin, rollouts=3)
    wanted = [ValuedRollout.every(rollout, 2, how(2)) for rollout in rollouts]
    file = tmp_path / "values.jsonl"

    def stop(valued, values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await coin.call(write_turn_values, source_of(coin), wanted, file, stop)
    assert len(read_turn_values(file)) == 2
    await coin.call(write_turn_values, source_of(coin), wanted, file)
    assert sorted((value.rollout_id, value.turn) for value in read_turn_values(file)) == sorted(
        (rollout.rollout_id, turn) for rollout in rollouts for turn in (0, 2)
    )
    logs = [log for log in find_logs(coin.node.root) if log.name.startswith("branch-demo-i0001-")]
    assert [len(log.read_text().splitlines()) for log in logs] == [4, 4, 4]
    asked, before = len(coin.vllm.requests), file.read_bytes()
    await coin.call(write_turn_values, source_of(coin), wanted, file)
    assert (len(coin.vllm.requests), file.read_bytes()) == (asked, before)
    more = [ValuedRollout.every(rollouts[0], 2, how(3))]
    await coin.call(write_turn_values, source_of(coin), more, file)
    assert [value.n for value in read_turn_values(file)][-2:] == [3, 3]


async def test_a_turn_whose_branches_are_refused_has_no_value(coin, tmp_path):
    (rollout,) = await adding(coin)
    rollout.messages[5]["content"] += "!"  # what answered turn 1
    file = tmp_path / "values.jsonl"
    await coin.call(write_turn_values, source_of(coin), [ValuedRollout.every(rollout, 1, how(2))], file)
    assert [(value.turn, value.n, value.refused, value.value is None) for value in read_turn_values(file)] == [
        (0, 2, 0, False),
        (1, 2, 0, False),
        (2, 0, 2, True),
        (3, 0, 2, True),
    ]


async def test_another_seed_goes_on_otherwise(coin):
    (rollout,) = await adding(coin)
    texts = []
    for seed in (0, 1, 0):
        request = continuation_request([Branch.of(rollout, [1])], how(6, seed=seed))
        source = source_of(coin)
        await coin.call(source.start, request)
        made = await coin.call(read_continuations, source, request)
        texts.append([r.messages for r in made.rollouts[rollout.rollout_id, 1]])
    assert texts[0] == texts[2] != texts[1]
    assert made.refused == {(rollout.rollout_id, 1): 0}


def test_the_standard_error_needs_two():
    assert TurnValue.of("r", 0, [0.5], 0, 1) == TurnValue("r", 0, 0.5, None, 1, 0, 1)
    assert TurnValue.of("r", 0, [0.0, 1.0], 0, 1).stderr == pytest.approx(0.5)
    assert TurnValue.of("r", 0, [], 3, 1).value is None


@pytest.mark.parametrize(("older", "newest"), [("demo-i0001", "demo-i0002"), ("demo-i0002-g0", "demo-i0001-g1")])
async def test_the_command_values_the_newest_training_collection(coin, tmp_path, monkeypatch, capsys, older, newest):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", TOKEN)
    await adding(coin, older)
    await adding(coin, newest, rollouts=2)
    took = [{"taken": {"group": name, "iteration": number}} for number, name in enumerate((older, newest))]
    (tmp_path / "stream.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in took if "-g" in newest))
    await adding(coin, "demo-i0002-dev")
    arguments = [str(tmp_path), "--continuations", "2", "--every", "3", "--most", "1"]
    coin.node.write_address(coin.url, os.getpid())  # the run's own node is running
    assert await coin.call(main, arguments) == 0
    file = tmp_path / "turn_values" / f"{newest}.jsonl"
    assert capsys.readouterr().out == f"written: {file}\n"
    assert [(value.turn, value.n) for value in read_turn_values(file)] == [(0, 2), (3, 2)]
    assert stored_protocol(coin.node.root / "collections" / f"{newest}.jsonl") == (Sampling(), LIMITS)


async def test_the_command_says_in_one_line_what_is_missing(coin, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", TOKEN)
    (tmp_path / "empty").mkdir()

    async def refusal(*arguments):
        assert await coin.call(main, list(arguments)) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "has no collection that was trained on; there are: none" in await refusal(str(tmp_path / "empty"))
    await adding(coin)
    coin.node.remove_address()
    (tmp_path / "rollout_node.yaml").write_text("environment: {name: 'os:abort'}\n")
    assert "the run's node is not running: start it with --node" in await refusal(str(tmp_path))
    coin.node.write_address(coin.url, os.getpid())
    version = await refusal(str(tmp_path), "--policy-version", "7")
    assert "policy version 7 is neither served nor in" in version
    (Path(coin.node.root) / "collections" / "demo-i0001.meta.jsonl").unlink()
    assert "holds no request" in await refusal(str(tmp_path))
