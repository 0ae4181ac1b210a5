"""Training on the logs of an earlier run."""

import json
from dataclasses import replace

import pytest

from agent_environments.shared_grade import SHARED_GRADE
from loop_formats.ids import branch_id, dev_id, group_id, training_id
from loop_formats.run_files import STREAM_FILE, log_path, meta_path
from loop_formats.schema import ConfigError
from loop_recipes.config.sft_config import FixedSetConfig
from loop_recipes.rollouts.fixed_set import read_fixed_set
from loop_recipes.rollouts.replay_source import ReplaySource
from loop_recipes.rollouts.source import NoRollouts
from support.counter_node import counter_request
from support.small_runs import stored_rollout


def write_log(folder, collection, version=0):
    rollout = stored_rollout(collection, "t_1", 0, version, 1.0, 300, seed=version)
    log_path(folder, collection).write_text(rollout.to_json() + "\n")
    meta_path(folder, collection).write_text("{}\n")
    return rollout


def test_an_iteration_is_given_its_log_and_dev_evaluations_are_passed_over(tmp_path):
    rollouts = []
    for iteration in (1, 2):
        write_log(tmp_path, dev_id("old", iteration - 1, "[]"))
        rollouts.append(write_log(tmp_path, training_id("old", iteration, "[]"), version=iteration))
    source = ReplaySource(tmp_path)
    for iteration in (1, 2):
        collected = source.read(counter_request(training_id("new", iteration, "[]")))
        assert collected.rollouts == [rollouts[iteration - 1]]
    with pytest.raises(NoRollouts, match="iteration 3 was asked for, but only 2 can be replayed"):
        source.read(counter_request(training_id("new", 3, "[]")))


def test_the_rounds_of_an_iteration_s_refill_are_replayed_with_it(tmp_path):
    ids = [training_id("old", 1, "[]"), *(training_id("old", 1, "[]", round_) for round_ in (1, 2))]
    rollouts = [write_log(tmp_path, name, version) for version, name in enumerate(ids)]
    later = write_log(tmp_path, training_id("old", 2, "[]"))
    source = ReplaySource(tmp_path)
    assert source.read(counter_request(training_id("new", 1, "[]"))).rollouts == rollouts
    assert source.read(counter_request(training_id("new", 2, "[]"))).rollouts == [later]


@pytest.mark.parametrize("round_", [0, 2])
def test_two_logs_of_one_iteration_are_refused(tmp_path, round_):
    """As a run that went back to an earlier checkpoint leaves them."""
    for protocol in ("[0]", "[1]"):
        write_log(tmp_path, training_id("old", 2, protocol, round_))
    with pytest.raises(ConfigError, match=r"old-i0002-.* and old-i0002-.* are of one iteration; leave one log of it"):
        ReplaySource(tmp_path)


def test_a_run_that_became_a_stream_is_replayed_whole(tmp_path):
    first = write_log(tmp_path, training_id("old", 1, "[]"))
    second = write_log(tmp_path, name := group_id("old", 1, "[]", 0))
    (tmp_path / STREAM_FILE).write_text(json.dumps({"taken": {"group": name, "iteration": 2}}) + "\n")
    source = ReplaySource(tmp_path)
    assert [source.read(counter_request(training_id("new", n, "[]"))).rollouts for n in (1, 2)] == [[first], [second]]
    write_log(tmp_path, training_id("old", 2, "[]"))
    with pytest.raises(ConfigError, match="iteration 2 has a log of its own and groups of a stream"):
        ReplaySource(tmp_path)


def test_logs_without_rollouts_to_train_on_are_refused(tmp_path):
    """Of an evaluation, of branches, or of a collection in which nothing had ended."""
    write_log(tmp_path, dev_id("old", 1, "[]"))
    write_log(tmp_path, branch_id(training_id("old", 1, "[]"), "[]"))
    with pytest.raises(ConfigError, match=r"rollout_node\.replay: .* holds only scores of policies and branches"):
        ReplaySource(tmp_path)
    log_path(tmp_path, training_id("old", 1, "[]")).touch()
    with pytest.raises(ConfigError, match=r"rollout_node\.replay: its logs hold no rollout"):
        ReplaySource(tmp_path).tasks("train")


def test_a_damaged_log_is_named(tmp_path):
    write_log(tmp_path, training_id("old", 1, "[]"))
    with log_path(tmp_path, training_id("old", 1, "[]")).open("a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match=r"rollout_node\.replay: .*old-i0001-.*\.jsonl:2: rollout schema None"):
        ReplaySource(tmp_path).read(counter_request(training_id("new", 1, "[]")))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"token_ids": [], "mask": [], "sampler_logprobs": []}, "has no token ids"),
        ({"dataset": f"a:mine + b:harbor ({SHARED_GRADE})"}, "an agent could forge its own reward"),
    ],
)
def test_rollouts_that_cannot_be_trained_on_are_refused(tmp_path, changed, says):
    rollout = write_log(tmp_path, training_id("old", 1, "[]"))
    turns = [replace(turn, start=0, end=0) for turn in rollout.turns] if "mask" in changed else rollout.turns
    log = log_path(tmp_path, training_id("old", 1, "[]"))
    log.write_text(replace(rollout, turns=turns, **changed).validate().to_json() + "\n")
    with pytest.raises(ConfigError, match=rf"rollout_node\.replay: .*{says}"):
        ReplaySource(tmp_path).tasks("train")
    with pytest.raises(ConfigError, match=rf"rollouts\.logs: .*{says}"):
        read_fixed_set(FixedSetConfig(logs=[str(log)]))
