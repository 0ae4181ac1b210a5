"""The average of a step against a sum written out in float64, however its rollouts are cut up and dealt to ranks."""

import itertools

import pytest
import torch

from loop_recipes.algorithm.critic import value_loss
from loop_recipes.algorithm.losses import ClippedPolicyLoss, LogLikelihood, Reinforce
from loop_recipes.algorithm.minibatches import Averaging
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.batching import BatchLayout, step_batches
from loop_recipes.engine.samples import episodes
from support.learner_cases import make_episodes, make_samples

LOW, HIGH, KL = 0.8, 1.28, 0.1


def clipped(ratio, advantage):
    return torch.minimum(ratio * advantage, ratio.clamp(LOW, HIGH) * advantage)


def geometric_mean(now, old):
    return (now - old).mean().exp().expand_as(now)


DAPO = {"eps": 0.2, "eps_high": 0.28}
# The loss, and each token's term in float64 from its log-probs now and when it was sampled, and its advantage.
LOSSES = {
    "loop": (ClippedPolicyLoss(**DAPO), lambda now, old, a: clipped((now - old).exp(), a)),
    "gspo": (ClippedPolicyLoss("geometric", **DAPO), lambda now, old, a: clipped(geometric_mean(now, old), a)),
    "cispo": (
        ClippedPolicyLoss(clip="cispo", **DAPO),
        lambda now, old, a: (now - old).exp().clamp(max=HIGH).detach() * a * now,
    ),
    "reinforce": (Reinforce(), lambda now, old, a: a * now),
    "kl": (
        ClippedPolicyLoss(kl_coefficient=KL, **DAPO),
        lambda now, old, a: clipped((now - old).exp(), a) - KL * ((old - now).exp() - (old - now) - 1),
    ),
    "likelihood": (LogLikelihood(), lambda now, old, a: a * now),
}


def written(samples, logprobs, term, divisor, sums):
    """The loss of a minibatch by its definition: all tokens alike, or each episode's mean (or sum) over a number."""
    whole = episodes(samples)
    total = torch.zeros((), dtype=torch.float64)
    for members in whole:
        terms = [term(logprobs[s.rollout_id], s.old_logprobs.double(), s.advantage) for s in members]
        every = torch.cat(terms)
        total = total + (every.sum() if sums or divisor == "tokens" else every.mean())
    count = sum(int(sample.mask.sum()) for sample in samples)
    return -total / {"tokens": count, "mean": len(whole)}.get(divisor, divisor)


@pytest.mark.fault("a loss whose mean over all tokens of a step could not be had")
@pytest.mark.parametrize(("budget", "packed", "ranks"), list(itertools.product((30, 80, 1000), (True, False), (1, 2))))
@pytest.mark.parametrize("divisor", ["tokens", "mean", 32.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_average_is_the_written_sum(name, divisor, budget, packed, ranks):
    """Also of an episode of several sequences, but for ratios of whole rollouts, which refuse one."""
    loss, term = LOSSES[name]
    samples = make_samples([21, 9, 17, 30, 12]) if name == "gspo" else make_episodes([3, 2])
    samples = [type(s)(**{**vars(s), "ref_logprobs": s.old_logprobs}) for s in samples]
    generator = torch.Generator().manual_seed(7)
    noise = {s.rollout_id: 0.3 * torch.randn(len(s.old_logprobs), generator=generator) for s in samples}
    logprobs = {s.rollout_id: (s.old_logprobs + noise[s.rollout_id]).double().requires_grad_() for s in samples}
    expected = written(samples, logprobs, term, divisor, loss.plan.sums_tokens)
    there = torch.cat(torch.autograd.grad(expected, list(logprobs.values())))
    average, total = Averaging.of(samples, UpdateConfig(loss_divisor=divisor)), 0.0
    for rank in range(ranks):
        for batch in step_batches(samples, BatchLayout(budget, packed, ranks, rank)):
            now = torch.cat([logprobs[each] for each in batch.rollout_ids] or [torch.empty(0)])
            total = total + average.term(loss(now, batch).per_rollout_loss, batch, loss.plan.sums_tokens)
    found = torch.cat(torch.autograd.grad(total, list(logprobs.values())))
    assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found, there, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("divisor", ["tokens", "mean", 32.0])
def test_the_critics_loss_is_averaged_as_the_policys(divisor):
    samples = make_episodes([3, 2])
    values = {s.rollout_id: torch.rand(len(s.old_logprobs), dtype=torch.float64) for s in samples}
    rewards = {s.rollout_id: s.reward for s in samples}
    errors = [
        torch.cat([(values[s.rollout_id] - rewards[s.rollout_id]) ** 2 for s in each]) for each in episodes(samples)
    ]
    sums = sum(each.sum() if divisor == "tokens" else each.mean() for each in errors)
    expected = sums / {"tokens": sum(map(len, errors)), "mean": len(errors)}.get(divisor, divisor)
    average = Averaging.of(samples, UpdateConfig(loss_divisor=divisor))
    parts = [
        average.term(value_loss(torch.cat([values[each] for each in batch.rollout_ids]).float(), batch), batch)
        for batch in step_batches(samples, BatchLayout(40, True))
    ]
    assert sum(parts).item() == pytest.approx(expected.item(), rel=1e-5)
