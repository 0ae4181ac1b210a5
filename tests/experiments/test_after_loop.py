"""experiments/after_loop.py: equal episodes in every arm, and what its intervals say of a finding."""

from dataclasses import replace

import pytest

from agent_environments.description import DEFAULT_DESCRIPTION
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.evaluation.scores import TaskResult
from support.experiment_scripts import load_experiment, made_up_record


@pytest.fixture(scope="module")
def after_loop():
    return load_experiment("after_loop")


def record(arm, seed, solved):
    """Of ten tasks the first so many are solved."""
    line = {"success": solved / 10, "steps": 1, "groups": 4, "groups_without_signal": 1}
    results = [TaskResult(f"t{n}", 0, success=n < solved, end_reason="completed") for n in range(10)]
    return replace(made_up_record(arm, seed, [line] * 6), results=results)


@pytest.mark.parametrize(
    ("arm", "solved", "said"),
    [
        ("tokens", (10, 10), "holds"),
        ("tokens", (0, 0), "does not hold"),
        ("tokens", (4, 6), "cannot be told apart"),
        ("group_4", (0, 0), "holds"),
        ("success", (4, 6), "cannot be told apart"),
        ("success", (10, 10), "does not hold"),
    ],
)
def test_a_finding_holds_where_the_interval_lies_on_its_side(after_loop, arm, solved, said):
    records = {
        name: [record(name, seed, each) for seed, each in enumerate(counts)]
        for name, counts in (("base", (5, 5)), (arm, solved))
    }
    text, rows = after_loop.table(records, DEFAULT_DESCRIPTION)
    assert text.splitlines()[-1].endswith(f"| {after_loop.ARMS[arm].claim} | {said} |")
    assert {"case": "base: groups of 8", "metric": "groups_with_signal", "value": 0.75, "unit": ""} in rows


def test_every_arm_samples_as_many_episodes(after_loop):
    for arm in after_loop.ARMS.values():
        words = ["preset=on_policy", *arm.collected(32), *arm.words]
        conf = read_config(compose("tiny_cpu", words), LoopConfig)
        assert conf.collection.tasks_per_iteration * conf.collection.rollouts_per_task == 32
