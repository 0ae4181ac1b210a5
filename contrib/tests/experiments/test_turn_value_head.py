"""experiments/turn_value_head.py: a critic of turns with a value head."""

import math
from dataclasses import replace

import pytest
import torch

from loop_recipes.algorithm.advantages import LeaveOneOut
from loop_recipes.algorithm.losses import ClippedPolicyLoss
from loop_recipes.algorithm.method import Method
from loop_recipes.algorithm.policy_update import PolicyUpdate
from loop_recipes.algorithm.preferences import ReturnPairs
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import adapter_parameters
from loop_recipes.engine.rank_batches import RankBatches
from support.experiment_scripts import load_experiment
from support.learner_cases import make_samples, tiny_lora_model


def test_a_value_head_learns_the_pairs_and_its_turns_add_up():
    model = attach_head(tiny_lora_model(tied=True, max_seq_len=64), TiledLogProbs(16, 32))
    config = UpdateConfig(minibatch_rollouts=None, micro_batch_tokens=200, packed=False, loss_divisor="mean")
    update = PolicyUpdate(
        model=model,
        optimizer=torch.optim.SGD(adapter_parameters(model).values(), lr=0.1),
        method=Method(ClippedPolicyLoss(), LeaveOneOut()),
        versions=AdapterVersions(model),
        config=config,
        batches=RankBatches(config, torch.device("cpu")),
        seed=0,
    )
    head = load_experiment("turn_value_head").TurnValueHead(update.scorer)
    samples = make_samples([33, 41, 27, 38, 30, 36])
    with pytest.raises(RuntimeError, match="must be fitted"):
        head.advantages(samples)
    with pytest.raises(ValueError, match="6 rollouts make no pair"):
        head.fit([replace(sample, reward=0.5) for sample in samples], ReturnPairs())
    losses = head.fit(samples, ReturnPairs(), steps=20)
    assert losses[0] == pytest.approx(math.log(2))
    assert losses[-1] < losses[0]
    found = head.advantages(samples)
    assert {name: len(turns) for name, turns in found.items()} == {s.rollout_id: s.turns for s in samples}
    rewards, groups = torch.tensor([s.reward for s in samples]), torch.tensor([0, 0, 0, 1, 1, 1])
    totals = [found[sample.rollout_id].sum() for sample in samples]
    again = head.fit(samples, ReturnPairs(), steps=21)[-1]
    margins = torch.stack([totals[a] - totals[b] for a, b in ReturnPairs().pairs(rewards, groups)])
    assert -torch.nn.functional.logsigmoid(0.1 * margins).mean().item() == pytest.approx(again, rel=1e-4)
