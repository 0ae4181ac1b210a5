"""experiments/games.py: the rows of a run that is made up, whose policy is the base model with an adapter."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from loop_formats.run_files import write_rollouts
from loop_recipes.engine.peft_export import write_empty_adapter
from loop_recipes.evaluation.report import SCHEMA
from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.paths import loop_package
from support.experiment_scripts import load_experiment
from support.small_runs import stored_rollout

MODEL = loop_package("tiny_policy")
QUEST = Path(__file__).parents[2] / "examples/quest.py"


@pytest.fixture(scope="module")
def game():
    return load_experiment("games")


@pytest.fixture
def run(tmp_path, game):
    """A run of one iteration, whose sampler was transformers."""
    folder = tmp_path / "game"
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rollouts = []
    for index in range(2):
        rollout = stored_rollout("game-i0001", "task", index, 0, 1.0, 300, index)
        logprobs = [0.0, *game.logprobs(model, rollout).tolist()]
        said = [value if mine else 0.0 for value, mine in zip(logprobs, rollout.mask, strict=True)]
        rollouts.append(dataclasses.replace(rollout, sampler_logprobs=said))
    write_rollouts(folder / "node/collections", "game-i0001", rollouts)
    write_rollouts(folder / "node/collections", "game-i0002", rollouts[:1])  # it still goes on
    write_empty_adapter(folder / "policies/policy-v0000", str(MODEL))
    OmegaConf.save({"model": {"path": str(MODEL)}}, folder / "config.yaml")
    line = {"iteration": 1, "reward": 0.25, "seconds": 60.0, "seconds_collecting": 15.0, "seconds_updating": 40.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line | {"gap_mean": 1e-5, "gap_p99": 1e-4}) + "\n")
    interval = {"low": 40.0, "high": 60.0}
    score = {"policy": "after", "sampling": {"label": "greedy"}, "success": {"mean": 50.0, "interval": interval}}
    (folder / "evaluation").mkdir()
    (folder / "evaluation/report.json").write_text(json.dumps({"scores": [score]}))
    return folder


def test_the_rows_of_a_run(game, run):
    rows = {(row["case"], row["metric"]): row["value"] for row in game.table(run)}
    assert rows["game", "iterations"] == 1
    assert rows["game", "reward_first_1"] == rows["game", "reward_last_1"] == 0.25
    assert rows["game after greedy", "success_low"] == 40.0
    assert rows["game", "sampled_tokens"] == 2 * rows["game", "sampled_an_episode"]
    assert 0 < rows["game", "turns_that_encode_to_other_ids"] <= 100
    assert rows["game version 0 in transformers", "difference_max"] <= 100


def test_a_version_that_acts_otherwise_is_seen(game, run):
    (rollouts,) = game.sampled(run)[:1]
    changed = [dataclasses.replace(one, sampler_logprobs=[2 * x for x in one.sampler_logprobs]) for one in rollouts]
    mean, _, without = game.in_transformers(run, changed, MODEL)
    assert mean["value"] == pytest.approx(without["value"], abs=1000)
    assert mean["value"] > 5e5


def test_runs_of_one_seed_are_compared_task_by_task(game, run, tmp_path):
    other = tmp_path / "other"
    lost = [dataclasses.replace(one, reward=0.25) for one in game.sampled(run)[0]]
    write_rollouts(other / "node/collections", "other-i0001", lost)
    rows = {row["metric"]: row for row in game.differences_of_reward([run], [other])}
    assert rows["reward_difference_all"]["case"] == "game against other"
    assert rows["reward_difference_all"]["value"] == rows["reward_difference_last_5"]["value"] == 75.0
    assert rows["reward_difference_all_low"]["value"] < 75.0
    assert rows["reward_difference_all_p"]["value"] == 1e4  # one task, whose sign may be either


def test_runs_are_compared_by_what_they_solve_after_training(game, run, tmp_path):
    def evaluated(name, solved):
        folder = tmp_path / name / "evaluation"
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps({"schema": SCHEMA}))
        results = [TaskResult(f"task{n}", 0, success=n < solved, solved=n < solved) for n in range(20)]
        lines = [json.dumps({"policy": "after", "sampling": "T=1", **result.to_dict()}) for result in results]
        (folder / "results.jsonl").write_text("\n".join(lines))
        return folder.parent

    ours, theirs = [evaluated("a1", 20), evaluated("a2", 20)], [evaluated("b1", 5), evaluated("b2", 15)]
    rows = {row["metric"]: row for row in game.differences_of_success(ours, theirs)}
    assert rows["success_difference T=1"]["case"] == "a1, a2 against b1, b2"
    assert rows["success_difference T=1"]["value"] == 50.0
    assert 0 < rows["success_difference T=1_low"]["value"] < 50 < rows["success_difference T=1_high"]["value"]
    assert rows["success_difference T=1_p"]["value"] < 100
    assert game.differences_of_success(ours, [theirs[0], tmp_path / "not_evaluated"]) == []


def test_a_run_whose_policies_were_not_kept_has_the_other_rows(game, run):
    (run / "policies").rename(run / "elsewhere")
    assert {row["case"] for row in game.table(run)} == {"game", "game after greedy"}
