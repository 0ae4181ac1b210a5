"""Policy losses and their gradients against the paper's equations, written out in plain float64."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_recipes.algorithm.loss_statistics import LossStatistics
from loop_recipes.algorithm.losses import ClippedPolicyLoss, LogLikelihood, Reinforce
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.samples import episodes
from support.learner_cases import make_samples

EPS, EPS_HIGH = 0.2, 0.28


def bound(advantage, clip):
    """g(A): A + eps |A| for the paper's clip; the reciprocal form only differs for A < 0, DAPO's only for A > 0."""
    if clip == "none":
        return math.inf
    if clip == "asymmetric" and advantage > 0:
        return advantage * (1 + EPS_HIGH)
    if clip != "reciprocal" or advantage > 0:
        return advantage + EPS * abs(advantage)
    return advantage / (1 + EPS)


def clipped_loss(level, clip):
    if clip == "asymmetric":
        return ClippedPolicyLoss(level=level, eps=EPS, eps_high=EPS_HIGH)
    return ClippedPolicyLoss(level=level, clip=clip, eps=EPS)


def surrogate(ratio, advantage, clip):
    """min(r A, g(A)) and its derivative by log r."""
    if ratio * advantage <= bound(advantage, clip):
        return ratio * advantage, ratio * advantage
    return bound(advantage, clip), 0.0


def by_hand(rollouts, level, clip):
    """Per-rollout losses and d(sum of losses)/d(log-prob), from [(advantage, [[(new, old), ...] per turn]), ...]."""
    losses, gradients = [], []
    for advantage, turns in rollouts:
        tokens = [pair for turn in turns for pair in turn]
        units = {"token": [[pair] for pair in tokens], "turn": turns}.get(level, [tokens])
        counts = [len(unit) if level == "geometric" else 1 for unit in units]
        logs = [sum(n - o for n, o in unit) / count for unit, count in zip(units, counts, strict=True)]
        values = [surrogate(math.exp(log), advantage, clip) for log in logs]
        losses.append(-math.fsum(value for value, _ in values) / len(units))
        for unit, count, (_, derivative) in zip(units, counts, values, strict=True):
            gradients += [-derivative / count / len(units)] * len(unit)
    return losses, gradients


def as_rollouts(batch, logprobs):
    rollouts = []
    for number, advantage in enumerate(batch.advantages.tolist()):
        turns = []
        for turn in (batch.turn_rollout == number).nonzero().flatten().tolist():
            chosen = batch.turn_index == turn
            turns.append(list(zip(logprobs[chosen].tolist(), batch.old_logprobs[chosen].tolist(), strict=True)))
        rollouts.append((advantage, turns))
    return rollouts


def as_episodes(samples, cuts):
    """Sample i as one of ``cuts[i]``, its episode."""
    numbers = [cuts[:place].count(cut) for place, cut in enumerate(cuts)]
    cut_up = [
        replace(sample, episode_id=f"episode-{cut}", segment=number, advantage=samples[cuts.index(cut)].advantage)
        for sample, cut, number in zip(samples, cuts, numbers, strict=True)
    ]
    whole = {members[0].episode: members for members in episodes(cut_up)}
    return [
        replace(
            sample,
            episode_tokens=sum(int(each.mask.sum()) for each in whole[sample.episode]),
            episode_turns=sum(each.turns for each in whole[sample.episode]),
        )
        for sample in cut_up
    ]


def random_batch(lengths, seed, spread):
    batch = collate_step(make_samples(lengths, seed), pad_id=0, packed=False)
    noise = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(seed))
    return batch, (batch.old_logprobs + spread * noise).double().float().requires_grad_()


@pytest.mark.parametrize("clip", ["symmetric", "reciprocal", "asymmetric", "none"])
@pytest.mark.parametrize("level", ["token", "turn", "trajectory", "geometric"])
@given(
    lengths=st.lists(st.integers(4, 24), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.0, 0.05, 0.3]),
)
@settings(max_examples=20)
def test_clipped_loss_and_gradient_equal_the_equations(level, clip, lengths, seed, spread):
    batch, logprobs = random_batch(lengths, seed, spread)
    output = clipped_loss(level, clip)(logprobs, batch)
    output.per_rollout_loss.sum().backward()
    losses, gradients = by_hand(as_rollouts(batch, logprobs.detach()), level, clip)
    torch.testing.assert_close(output.per_rollout_loss, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradients), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", ["token", "turn"])
@given(cuts=st.lists(st.integers(0, 2), min_size=2, max_size=6), seed=st.integers(0, 2**20))
@settings(max_examples=30)
def test_an_episode_of_several_sequences_has_the_loss_of_all_its_turns(level, cuts, seed):
    """Eq. 10's mean is over the whole episode, wherever its sequences are computed."""
    samples = as_episodes(make_samples([5 + 3 * place for place in range(len(cuts))], seed), cuts)
    batches = [collate_step([sample], 0, packed=False) for sample in samples]
    total, gradients = {}, []
    turns_of, advantage_of = {}, {}
    for sample, batch in zip(samples, batches, strict=True):
        noise = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(seed))
        logprobs = (batch.old_logprobs + 0.2 * noise).double().float().requires_grad_()
        output = ClippedPolicyLoss(level=level, eps=EPS)(logprobs, batch)
        output.per_rollout_loss.sum().backward()
        total[sample.episode] = total.get(sample.episode, 0.0) + output.per_rollout_loss.item()
        gradients.append((sample.episode, logprobs.grad))
        [(advantage, turns)] = as_rollouts(batch, logprobs.detach())
        turns_of.setdefault(sample.episode, []).extend(turns)
        advantage_of[sample.episode] = advantage
    for episode, turns in turns_of.items():
        losses, gradient = by_hand([(advantage_of[episode], turns)], level, "symmetric")
        assert total[episode] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
        mine = torch.cat([values for other, values in gradients if other == episode])
        torch.testing.assert_close(mine, torch.tensor(gradient), rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 2**20), spread=st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=25)
def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient(seed, spread):
    batch, logprobs = random_batch([7, 15, 11], seed, spread)
    output = ClippedPolicyLoss(clip="cispo", eps_high=EPS_HIGH)(logprobs, batch)
    output.per_rollout_loss.sum().backward()
    losses, gradients, bounded = [], [], []
    for number, advantage in enumerate(batch.advantages.tolist()):
        own = batch.rollout_index == number
        pairs = list(zip(logprobs.detach()[own].tolist(), batch.old_logprobs[own].tolist(), strict=True))
        weights = [min(math.exp(new - old), 1 + EPS_HIGH) for new, old in pairs]
        terms = [weight * advantage * new for weight, (new, _) in zip(weights, pairs, strict=True)]
        losses.append(-math.fsum(terms) / len(pairs))
        gradients += [-weight * advantage / len(pairs) for weight in weights]
        bounded += [math.exp(new - old) > 1 + EPS_HIGH for new, old in pairs]
    torch.testing.assert_close(output.per_rollout_loss, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradients), rtol=1e-4, atol=1e-5)
    assert output.clipped.tolist() == bounded


@pytest.mark.parametrize("level", ["trajectory", "geometric"])
def test_one_ratio_per_rollout_refuses_episodes_of_several_sequences(level):
    batch = collate_step(as_episodes(make_samples([9, 9]), [0, 0]), 0, packed=True)
    with pytest.raises(ValueError, match="needs episodes of one sequence"):
        ClippedPolicyLoss(level=level)(batch.old_logprobs, batch)


def test_on_policy_all_levels_have_the_value_of_minus_the_advantage():
    batch, _ = random_batch([9, 17, 12], 3, 0.0)
    for level in ("token", "turn", "trajectory", "geometric"):
        output = ClippedPolicyLoss(level=level)(batch.old_logprobs, batch)
        torch.testing.assert_close(output.per_rollout_loss, -batch.advantages)
        assert not output.clipped.any()


def test_on_policy_token_gradient_is_reinforce():
    batch, logprobs = random_batch([9, 17, 12], 5, 0.0)
    (clipped,) = torch.autograd.grad(ClippedPolicyLoss()(logprobs, batch).per_rollout_loss.sum(), logprobs)
    (plain,) = torch.autograd.grad(Reinforce()(logprobs, batch).per_rollout_loss.sum(), logprobs)
    torch.testing.assert_close(clipped, plain)


def test_reinforce_is_the_token_mean_and_needs_no_old_logprobs():
    batch, logprobs = random_batch([6, 13], 8, 0.2)
    output = Reinforce()(logprobs, replace(batch, old_logprobs=None))
    for number, value in enumerate(output.per_rollout_loss.tolist()):
        own = logprobs.detach()[batch.rollout_index == number].tolist()
        assert value == pytest.approx(-batch.advantages[number].item() * math.fsum(own) / len(own), rel=1e-5)
    assert output.log_ratio.abs().max() == 0


def test_log_likelihood_is_the_weighted_sum_over_a_rollouts_tokens():
    batch, logprobs = random_batch([6, 13, 9], 8, 0.2)
    for weights in (None, torch.linspace(-1, 1, len(batch.targets))):
        output = LogLikelihood()(logprobs, replace(batch, token_advantages=weights))
        each = batch.advantages[batch.rollout_index] if weights is None else weights
        for number, value in enumerate(output.per_rollout_loss.tolist()):
            own = batch.rollout_index == number
            terms = [w * p for w, p in zip(each[own].tolist(), logprobs.detach()[own].tolist(), strict=True)]
            assert value == pytest.approx(-math.fsum(terms), rel=1e-5, abs=1e-6)
        (gradient,) = torch.autograd.grad(output.per_rollout_loss.sum(), logprobs)
        torch.testing.assert_close(gradient, -each)
    assert LogLikelihood()(logprobs, replace(batch, old_logprobs=None)).log_ratio.abs().max() == 0


@given(seed=st.integers(0, 2**20), coefficient=st.sampled_from([0.01, 0.5]))
@settings(max_examples=25)
def test_kl_term_equals_the_estimator(seed, coefficient):
    batch, logprobs = random_batch([7, 15, 11], seed, 0.1)
    reference = batch.old_logprobs + 0.2 * torch.randn_like(batch.old_logprobs)
    batch = replace(batch, ref_logprobs=reference)
    with_kl = ClippedPolicyLoss(kl_coefficient=coefficient)(logprobs, batch)
    extra = with_kl.per_rollout_loss - ClippedPolicyLoss()(logprobs, batch).per_rollout_loss
    for number in range(3):
        own = batch.rollout_index == number
        pairs = zip(reference[own].tolist(), logprobs.detach()[own].tolist(), strict=True)
        terms = [math.exp(r - p) - (r - p) - 1 for r, p in pairs]
        reference_kl = with_kl.metrics["reference_kl"][number].item()
        assert reference_kl == pytest.approx(math.fsum(terms) / len(terms), rel=1e-3, abs=1e-6)
        assert extra[number].item() == pytest.approx(coefficient * math.fsum(terms) / len(terms), rel=1e-2, abs=1e-6)
    (gradient,) = torch.autograd.grad(extra.sum(), logprobs)
    counts = torch.bincount(batch.rollout_index)[batch.rollout_index]
    expected = coefficient * (1 - torch.exp(reference - logprobs.detach())) / counts
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_per_token_advantages_replace_the_rollouts_own():
    batch, logprobs = random_batch([9, 12], 2, 0.0)
    advantages = torch.linspace(-1, 1, len(batch.targets))
    output = ClippedPolicyLoss()(logprobs, replace(batch, token_advantages=advantages))
    for number, value in enumerate(output.per_rollout_loss.tolist()):
        assert value == pytest.approx(-advantages[batch.rollout_index == number].mean().item(), abs=1e-6)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_an_overflowing_ratio_on_the_clipped_side_gives_the_bound_and_no_nan(advantage):
    batch, _ = random_batch([9], 2, 0.0)
    batch = replace(batch, advantages=torch.tensor([advantage]))
    logprobs = (batch.old_logprobs + (200.0 if advantage >= 0 else -200.0)).requires_grad_()
    output = ClippedPolicyLoss(level="trajectory", eps=EPS)(logprobs, batch)
    output.per_rollout_loss.sum().backward()
    assert output.per_rollout_loss.item() == pytest.approx(-bound(advantage, "symmetric"))
    assert logprobs.grad.abs().max() == 0


def test_an_all_ignored_micro_batch_contributes_nothing_but_keeps_the_graph():
    batch = collate_step([], pad_id=0, packed=False)
    logprobs = torch.zeros(0, requires_grad=True)
    for loss in (ClippedPolicyLoss(kl_coefficient=0.1), ClippedPolicyLoss("turn"), ClippedPolicyLoss("trajectory")):
        total = loss(logprobs, batch).per_rollout_loss.sum()
        total.backward()
        assert total.item() == 0.0


def test_statistics_of_known_ratios():
    batch, _ = random_batch([30, 40], 1, 0.0)
    batch = replace(batch, advantages=torch.ones(2))
    log_ratio = torch.linspace(-0.5, 0.5, len(batch.targets))
    statistics = LossStatistics()
    statistics.add(ClippedPolicyLoss(eps=EPS)(batch.old_logprobs + log_ratio, batch))
    summary = statistics.summary()
    assert summary["ratio_p50"] == pytest.approx(1.0, abs=0.03)
    assert summary["ratio_max"] == pytest.approx(math.exp(0.5), rel=1e-4)
    assert summary["clip_fraction"] == pytest.approx((log_ratio > math.log(1 + EPS)).float().mean().item())
    assert summary["approx_kl"] == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-3)
    assert LossStatistics().summary() == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClippedPolicyLoss(eps=1.5), "eps 1.5"),
        (lambda: ClippedPolicyLoss("turn", clip="cispo"), "needs level: token"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_missing_is_named():
    batch, logprobs = random_batch([8], 0, 0.0)
    with pytest.raises(ValueError, match="set old_logprobs"):
        ClippedPolicyLoss()(logprobs, replace(batch, old_logprobs=None))
    with pytest.raises(ValueError, match="set ref_logprobs"):
        Reinforce(kl_coefficient=0.1)(logprobs, batch)
    with pytest.raises(ValueError, match="need level: token"):
        ClippedPolicyLoss("turn")(logprobs, replace(batch, token_advantages=logprobs.detach()))


def test_the_loss_that_the_page_shows_is_reinforce():
    page = (Path(__file__).parents[3] / "docs/architecture.md").read_text()
    [block] = [each for each in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "class MyLoss" in each]
    names = {}
    exec(block, names)
    batch, logprobs = random_batch([9, 5], seed=0, spread=0.1)
    shown, ours = names["MyLoss"]()(logprobs, batch), Reinforce()(logprobs, batch)
    torch.testing.assert_close(shown.per_rollout_loss, ours.per_rollout_loss)
    torch.testing.assert_close(shown.token_log_ratio, ours.token_log_ratio)
    (statistics := LossStatistics()).add(shown)
    (own,) = names["MyLoss"].figures
    assert statistics.summary()[own] == pytest.approx(-logprobs.mean().item())
    statistics.add_metrics({"mean": logprobs.mean(), "lengths": batch.episode_tokens, "number": 0.5})
    assert statistics.summary()["lengths"] == batch.episode_tokens.float().mean().item(), "one value, or whole numbers"
