"""The learned critic: its formulas, its schedule, and that it never moves the policy."""

import pytest
import torch

from loop_recipes.algorithm.critic import Critic, token_advantages, value_loss
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from support.learner_cases import make_samples, tiny_lora_model


def a_critic(width, hidden_sizes=None, seed=0):
    critic = Critic(hidden_sizes, seed=seed)
    critic.make_weights(width)
    return critic


def test_the_papers_shape():
    critic = a_critic(5120)
    assert [list(p.shape) for p in critic.parameters() if p.ndim == 2] == [[3072, 5120], [2048, 3072], [1, 2048]]
    assert [type(m).__name__ for m in critic.mlp] == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_the_papers_schedule():
    critic = a_critic(4, hidden_sizes=(3, 2))
    assert critic.coefficient(0) == pytest.approx(0.1)
    assert critic.coefficient(100) == pytest.approx((0.1 + 0.001) / 2)
    assert critic.coefficient(200) == critic.coefficient(500) == pytest.approx(0.001)
    assert critic.plan.policy_rests_iterations == 10


def test_advantages_and_loss_equal_the_formulas():
    samples = make_samples([12, 20])
    batch = collate_step(samples, 0, packed=False)
    values = torch.linspace(-0.5, 1.5, len(batch.targets), requires_grad=True)
    position, losses = 0, []
    advantages = token_advantages(values, batch).tolist()
    for sample in samples:
        errors = []
        for _ in range(int(sample.mask.sum())):
            value = values[position].item()
            assert advantages[position] == pytest.approx(sample.reward - min(1.0, max(0.0, value)), abs=1e-6)
            errors.append((value - sample.reward) ** 2)
            position += 1
        losses.append(sum(errors) / len(errors))
    torch.testing.assert_close(value_loss(values, batch), torch.tensor(losses))
    assert not token_advantages(values, batch).requires_grad


def test_the_value_loss_reaches_the_critic_but_not_the_policy():
    decoder = attach_head(tiny_lora_model(True), TiledLogProbs())
    critic = a_critic(32, hidden_sizes=(16, 8))
    batch = collate_step(make_samples([12, 20, 15]), 0, packed=True)
    outputs = decoder(**batch.inputs(), with_hidden=True)
    value_loss(critic(outputs.hidden), batch).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in critic.parameters())
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = a_critic(4, hidden_sizes=(3, 2), seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = a_critic(4, hidden_sizes=(3, 2), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
