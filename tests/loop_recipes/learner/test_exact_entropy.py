"""The metric `entropy`: of whole distributions, under the version that sampled each token."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from loop_recipes.learner.advantages import LeaveOneOut
from support.small_runs import replay_config, train


def entropy_by_hand(folder, iteration):
    """Of the base model at the sampled tokens of rollouts with signal, from all logits, float64."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    log = folder / "logs" / f"made-up-i{iteration:04d}.jsonl"
    rollouts = [json.loads(line) for line in log.read_text().splitlines()]
    rewards = torch.tensor([rollout["reward"] for rollout in rollouts])
    groups = torch.tensor([int(rollout["task_id"][-1]) for rollout in rollouts])
    entropies = []
    for rollout, advantage in zip(rollouts, LeaveOneOut()(rewards, groups).tolist(), strict=True):
        if abs(advantage) >= 0.01:
            with torch.no_grad():
                logits = model(torch.tensor([rollout["token_ids"]])).logits[0, :-1]
            sampled = torch.tensor(rollout["mask"][1:], dtype=torch.bool)
            entropies.append(torch.distributions.Categorical(logits=logits).entropy()[sampled])
    return torch.cat(entropies).mean().item()


def test_it_is_that_of_the_policy_that_sampled(tmp_path):
    """A fresh adapter changes nothing, so version 0 is the base model; the second iteration trains on it too."""
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2, stale_by=1))
    cfg.collection.max_policy_lag = 1
    train(cfg)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["policy_lag"] for line in lines] == [0, 1]
    for line in lines:
        assert line["entropy"] == pytest.approx(entropy_by_hand(tmp_path, line["iteration"]), rel=1e-5)
