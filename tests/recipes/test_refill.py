"""Groups without signal are replaced, and their tasks rest: what is trained on, counted, and found again by a run that
was stopped or killed at any moment; and by each of two ranks."""

import json

import pytest
import torch
from safetensors.torch import load_file

from loop_formats.ids import parse_collection_id
from loop_formats.run_folder import read_metrics
from loop_recipes.engine.checkpoint import latest_checkpoint
from support.deaths import Killed
from support.rank_records import records
from support.ranks import on_ranks
from support.refilled_runs import (
    DULL,
    TOKEN_ENV,
    Disk,
    adapters,
    train_refilled,
    train_refilled_recorded,
)
from support.small_runs import replay_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, "unused")
    return replay_config(tmp_path, iterations=2)


@pytest.fixture
def run(config, tmp_path):
    """Trains into ``<tmp>/<name>`` on nodes with this disk; returns the moments that it reached."""

    def trained(name, disk, nodes=1, at=None, end=None, **collection):
        return train_refilled(config, tmp_path / name, disk, collection, nodes, at, end)

    return trained


def told(folder):
    timed = ("second", "flops", "memory")
    lines = read_metrics(folder)
    return [{key: value for key, value in line.items() if not any(word in key for word in timed)} for line in lines]


def test_an_iteration_has_the_groups_it_asked_for_and_counts_those_it_threw_away(run, tmp_path):
    disk = Disk()
    run("run", disk, refill_budget=2)
    for line in read_metrics(tmp_path / "run"):
        names = {id_: parse_collection_id(id_) for id_ in disk.collections}
        mine = {names[id_].refill: disk.collections[id_] for id_ in names if names[id_].iteration == line["iteration"]}
        tasks = [rollout.task_id for rollouts in mine.values() for rollout in rollouts]
        assert line["groups"] == len(set(tasks)) <= 6
        with_signal = line["groups"] - line["groups_without_signal"]
        assert with_signal == 3 or line["groups"] == 6, "until there are as many as it asked for, or the budget is used"
        assert line["refilled_groups"] == line["groups"] - 3
        assert (line["rollouts"], line["all_rollouts"]) == (len(tasks), 4 * line["groups"])
        sampled = sum(rollout.sampled_tokens for rollouts in mine.values() for rollout in rollouts)
        assert line["all_sampled_tokens"] == sampled + 10 * line["dropped_rollouts"]
        assert line["reward"] == pytest.approx(
            sum(rollout.reward for rollouts in mine.values() for rollout in rollouts) / len(tasks)
        ), "of all that was sampled, not of what was chosen for its rewards"
    assert any(line["refilled_groups"] for line in read_metrics(tmp_path / "run"))


def test_dull_tasks_rest(run, tmp_path):
    disk = Disk()
    run("run", disk, rest_iterations=2, tasks_per_iteration=4)
    drawn = [{rollout.task_id for rollout in rollouts} for rollouts in disk.collections.values()]
    assert not drawn[1] & drawn[0] & {*DULL}
    resting = [line["resting_tasks"] for line in read_metrics(tmp_path / "run")]
    assert resting[:2] == [len(drawn[0] & {*DULL}), len((drawn[0] | drawn[1]) & {*DULL})]


def left(folder):
    """All that the last checkpoint holds, but for the config."""
    last = latest_checkpoint(folder / "checkpoints")
    state = json.loads((last / "state.json").read_text())
    return {**state, "config": None} | {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def assert_the_same(one, other):
    assert adapters(one) == adapters(other)
    assert told(one) == told(other)
    assert left(one) == left(other), "tasks that rest, among others"


def places(names, *wanted):
    """Of the chosen ones among moments of the same name, such as ``("read", -1)``, the last."""
    return [[at for at, other in enumerate(names) if other == name][number] for name, number in wanted]


EVERY = pytest.param(True, marks=pytest.mark.drill)


@pytest.mark.parametrize("every", [False, EVERY])
@pytest.mark.parametrize(("lag", "nodes"), [(0, 1), (1, 2)])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(run, tmp_path, lag, nodes, every):
    """In its last round; with all rounds collected; trained, with no checkpoint of it. Or at every moment."""

    def kill():
        raise Killed

    disk = Disk()
    settings = {"refill_budget": 2, "rest_iterations": 2, "max_policy_lag": lag, "nodes": nodes}
    names = run("whole", disk, **settings)
    asked = sorted(disk.collections)
    chosen = range(len(names)) if every else places(names, ("read", -1), ("update", -1), ("save_checkpoint", -1))
    for at in chosen:
        with pytest.raises(Killed):
            run(f"killed_{at}", disk, at=at, end=kill, **settings)
        run(f"killed_{at}", disk, **settings)
        assert_the_same(tmp_path / f"killed_{at}", tmp_path / "whole")
    assert sorted(disk.collections) == asked, "it finds what it asked for before"
    assert any(parse_collection_id(id_).refill for id_ in asked)


@pytest.mark.parametrize("every", [False, EVERY])
@pytest.mark.parametrize(("lag", "nodes"), [(0, 1), (1, 2)])
def test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not_been(run, tmp_path, lag, nodes, every):
    """After an iteration; while it waits for a round. Or at every moment before the last update."""
    disk = Disk()
    settings = {"refill_budget": 2, "rest_iterations": 2, "max_policy_lag": lag, "nodes": nodes}
    names = run("whole", disk, **settings)
    asked = sorted(disk.collections)
    chosen = places(names, ("save_checkpoint", 0), ("read", -1))
    for at in range(chosen[-1] + 1) if every else chosen:
        folder = tmp_path / f"stopped_{at}"
        folder.mkdir()
        run(folder.name, disk, at=at, end=(folder / "stop").touch, **settings)
        assert not (folder / "checkpoints/iteration_0002").exists(), "it has stopped"
        run(folder.name, disk, **settings)
        assert_the_same(folder, tmp_path / "whole")
    assert sorted(disk.collections) == asked


@pytest.mark.integration
def test_two_ranks_replace_the_same_groups_learn_what_one_does_and_go_on_exactly(config, tmp_path):
    work = Disk(seed=1), {"refill_budget": 2, "rest_iterations": 2, "max_policy_lag": 1}, 1
    one, two, stopped = (tmp_path / name for name in ("one", "two", "stopped"))
    train_refilled_recorded(config, one, *work)
    names = on_ranks(2, train_refilled_recorded, config, two, *work)

    (alone,), shared = records(one), records(two)
    assert shared[0] == shared[1], "they ask for the same, and give each rollout the same advantage"
    assert [tasks for _, tasks in alone["asked"]] == [tasks for _, tasks in shared[0]["asked"]]
    assert any(parse_collection_id(id_).refill for id_, _ in shared[0]["asked"])
    for first, second in zip(told(one), told(two), strict=True):
        for key in ("loss", "grad_norm", "reward", "groups", "kept_fraction", "refilled_groups", "resting_tasks"):
            assert second[key] == pytest.approx(first[key], rel=1e-4, abs=1e-6), (first["iteration"], key)
    for file in sorted(one.glob("policies/*/adapter_model.safetensors")):
        torch.testing.assert_close(load_file(two / file.relative_to(one)), load_file(file), rtol=0.0, atol=1e-5)

    (at,) = places(names, ("read", -1))
    stopped.mkdir()
    on_ranks(2, train_refilled_recorded, config, stopped, *work, at, (stopped / "stop").touch)
    assert not (stopped / "checkpoints/iteration_0002").exists(), "it has stopped while it waits for a round"
    on_ranks(2, train_refilled_recorded, config, stopped, *work)
    assert_the_same(stopped, two)
