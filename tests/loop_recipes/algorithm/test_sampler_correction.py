"""Weights for the gap between sampler and learner: against plain float64, and on a sampler that is really off."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_formats.schema import ConfigError
from loop_recipes.algorithm.loss_statistics import LossStatistics
from loop_recipes.algorithm.losses import ClippedPolicyLoss, Reinforce
from loop_recipes.algorithm.sampler_correction import DivergenceMask, RatioMask, TruncatedWeights
from loop_recipes.config.components import build, check_component
from loop_recipes.engine.batching import collate_step
from support.learner_cases import adapter_gradient, make_samples, tiny_decoder

EPS = 0.2
HERE = "loop_recipes.algorithm.sampler_correction"
CORRECTIONS = {
    "none": None,
    "truncated": TruncatedWeights(cap=1.2),
    "truncated_sequence": TruncatedWeights("sequence", cap=1.5),
    "mask": RatioMask(low=0.8, high=1.25),
    "mask_sequence": RatioMask("sequence", low=0.6, high=2.0),
    "tv": DivergenceMask("tv", limit=0.05),
    "kl": DivergenceMask("kl", limit=0.01),
}


def with_gap(samples, spread, seed=0):
    """The samples with log-probs around -0.7 and a sampler that is off by so much."""
    generator = torch.Generator().manual_seed(seed)

    def noise(sample):
        return torch.randn(len(sample.old_logprobs), generator=generator)

    own = [replace(sample, old_logprobs=-0.7 + 0.3 * noise(sample).clamp(-2, 2)) for sample in samples]
    off = [(sample.old_logprobs + spread * noise(sample)).clamp(max=-0.01) for sample in own]
    return [replace(sample, sampler_logprobs=each) for sample, each in zip(own, off, strict=True)]


def weight_by_hand(name, own, others, advantage, now):
    """(weight, cut) of a token from k of the token and of its sequence, in float64."""
    of_token, of_sequence = own[0] - own[1], math.fsum(old - sampler for old, sampler in others)
    pi, mu = math.exp(now), math.exp(own[1])
    further = advantage * (pi - mu) > 0
    match name:
        case "none":
            return 1.0, False
        case "truncated":
            return min(math.exp(of_token), 1.2), math.exp(of_token) > 1.2
        case "truncated_sequence":
            return min(math.exp(of_sequence), 1.5), math.exp(of_sequence) > 1.5
        case "mask":
            inside = 0.8 <= math.exp(of_token) <= 1.25
            return inside * math.exp(of_token), not inside
        case "mask_sequence":
            inside = 0.6 <= math.exp(of_sequence) <= 2.0
            return inside * math.exp(of_sequence), not inside
        case "tv":
            cut = further and abs(pi - mu) > 0.05
        case "kl":
            cut = further and mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi)) > 0.01
    return (0.0 if cut else math.exp(of_token)), cut


def surrogate(ratio, advantage):
    """min(r A, A + eps |A|) and its derivative by log r."""
    bound = advantage + EPS * abs(advantage)
    return (ratio * advantage, ratio * advantage) if ratio * advantage <= bound else (bound, 0.0)


@pytest.mark.parametrize("name", CORRECTIONS)
@given(
    lengths=st.lists(st.integers(4, 24), min_size=1, max_size=5),
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.0, 0.1, 0.4]),
)
@settings(max_examples=20)
def test_a_corrected_loss_and_its_gradient_equal_the_equations(name, lengths, seed, spread):
    batch = collate_step(with_gap(make_samples(lengths, seed), spread, seed), pad_id=0, packed=True)
    noise = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(seed))
    logprobs = (batch.old_logprobs + 0.15 * noise).clamp(max=-0.01).requires_grad_()
    output = ClippedPolicyLoss(eps=EPS, sampler_correction=CORRECTIONS[name])(logprobs, batch)
    output.per_rollout_loss.sum().backward()
    losses, gradient, weights, cuts = [], [], [], []
    for number, advantage in enumerate(batch.advantages.tolist()):
        own = batch.rollout_index == number
        pairs = list(zip(batch.old_logprobs[own].tolist(), batch.sampler_logprobs[own].tolist(), strict=True))
        values = []
        for pair, now in zip(pairs, logprobs.detach()[own].tolist(), strict=True):
            weight, cut = weight_by_hand(name, pair, pairs, advantage, now)
            value, derivative = surrogate(math.exp(now - pair[0]), advantage)
            values.append(weight * value)
            gradient.append(-weight * derivative / len(pairs))
            weights.append(weight)
            cuts.append(cut)
        losses.append(-math.fsum(values) / len(pairs))
    torch.testing.assert_close(output.per_rollout_loss, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient), rtol=1e-4, atol=1e-5)
    if output.metrics:
        torch.testing.assert_close(output.metrics["correction_weight"], torch.tensor(weights), rtol=1e-4, atol=1e-6)
        assert output.metrics["correction_cut"].tolist() == cuts


@pytest.mark.parametrize("level", ["turn", "trajectory", "geometric"])
def test_a_sequences_weight_scales_its_loss_at_every_level(level):
    batch = collate_step(with_gap(make_samples([9, 14, 20]), 0.2), 0, packed=True)
    logprobs = batch.old_logprobs + 0.05
    plain = ClippedPolicyLoss(level, eps=EPS)(logprobs, batch)
    corrected = ClippedPolicyLoss(level, eps=EPS, sampler_correction=TruncatedWeights("sequence", 1.5))(logprobs, batch)
    gap = batch.old_logprobs - batch.sampler_logprobs
    weights = [min(1.5, math.exp(math.fsum(gap[batch.rollout_index == n].tolist()))) for n in range(3)]
    torch.testing.assert_close(corrected.per_rollout_loss, plain.per_rollout_loss * torch.tensor(weights))


def test_without_a_limit_the_masked_ratio_is_that_to_the_sampler():
    """DPPO's ratio is pi / mu, whatever version the learner began the iteration with."""
    batch = collate_step(with_gap(make_samples([9, 14]), 0.3), 0, packed=True)
    logprobs = batch.old_logprobs - 0.1
    output = ClippedPolicyLoss(clip="none", sampler_correction=DivergenceMask(limit=1.0))(logprobs, batch)
    for number, loss in enumerate(output.per_rollout_loss.tolist()):
        own = batch.rollout_index == number
        ratios = (logprobs - batch.sampler_logprobs)[own].double().exp()
        assert loss == pytest.approx(-batch.advantages[number].item() * ratios.mean().item(), rel=1e-5)


@pytest.mark.slow
def test_packed_and_padded_rollouts_have_the_same_corrected_loss_and_gradient():
    samples, found = with_gap(make_samples([30, 17, 24]), 0.2), []
    for packed in (True, False):
        decoder = tiny_decoder(token_tile=16, vocab_tile=32)
        batch = collate_step(samples, 0, packed)
        output = ClippedPolicyLoss("turn", sampler_correction=TruncatedWeights("sequence"))(
            decoder(**batch.inputs()).logprobs, batch
        )
        output.per_rollout_loss.sum().backward()
        found.append((output.per_rollout_loss.detach(), adapter_gradient(decoder)))
    torch.testing.assert_close(*(loss for loss, _ in found), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*(gradient for _, gradient in found), rtol=1e-3, atol=1e-5)


def test_a_masked_token_may_be_beyond_fp32():
    batch = collate_step(with_gap(make_samples([9]), 0.0), 0, packed=True)
    batch = replace(batch, sampler_logprobs=batch.old_logprobs - 300.0)
    for correction in (TruncatedWeights(), RatioMask(), TruncatedWeights("sequence")):
        logprobs = batch.old_logprobs.clone().requires_grad_()
        output = Reinforce(sampler_correction=correction)(logprobs, batch)
        output.per_rollout_loss.sum().backward()
        assert output.metrics["correction_cut"].all()
        assert bool(logprobs.grad.isfinite().all())
    certain = replace(batch, sampler_logprobs=torch.zeros_like(batch.old_logprobs), old_logprobs=batch.old_logprobs * 0)
    assert DivergenceMask("kl")(certain.old_logprobs, certain).values.tolist() == [1.0] * len(certain.targets)


def test_the_metrics_are_the_mean_weight_and_the_share_that_was_cut():
    batch = collate_step(with_gap(make_samples([30, 40]), 0.3), 0, packed=True)
    statistics = LossStatistics()
    statistics.add(ClippedPolicyLoss(sampler_correction=RatioMask(low=0.8, high=1.2))(batch.old_logprobs, batch))
    summary = statistics.summary()
    ratios = (batch.old_logprobs - batch.sampler_logprobs).double().exp()
    inside = (ratios >= 0.8) & (ratios <= 1.2)
    assert summary["correction_cut"] == pytest.approx(1 - inside.double().mean().item(), abs=1e-6)
    assert summary["correction_weight"] == pytest.approx((ratios * inside).mean().item(), rel=1e-5)
    plain = LossStatistics()
    plain.add(ClippedPolicyLoss()(batch.old_logprobs, batch))
    assert plain.summary().keys() == summary.keys() - {"correction_cut", "correction_weight"}


class Simulated:
    """Two tokens of a one-parameter policy ``p(a) ~ exp(theta a)`` over eight; the sampler's is another temperature,
    some steps old, and noisy as a coarse float is on a rare token (Student's t with two degrees of freedom). Every
    pair of tokens is in the batch, weighed by how often the sampler draws it, so that gradients are expectations."""

    values = torch.arange(8) - 3.5
    optimum = 0.474
    """Of theta: where the mean return under the policy itself is highest."""

    def __init__(self, temperature=1.0, stale_by=0, noise=0.0):
        self.temperature, self.stale_by, self.noise = temperature, stale_by, noise
        self.pairs = torch.tensor(list(itertools.product(range(8), repeat=2)))
        self.returns = -((self.values[self.pairs].mean(1) - 1.5) ** 2)
        [sample] = make_samples([3])
        sample = replace(
            sample,
            mask=torch.tensor([False, True, True]),
            turn_ids=torch.tensor([-1, 0, 0]),
            sampler_logprobs=torch.zeros(2),
            old_logprobs=torch.zeros(2),
            episode_tokens=2,
            episode_turns=1,
        )
        self.batch = collate_step([replace(sample, rollout_id=str(n)) for n in range(64)], 0, packed=True)

    def logprobs(self, theta):
        return (theta * self.values).log_softmax(0)

    def trained(self, correction, steps=200):
        """Theta after so many steps."""
        theta, past = torch.zeros((), requires_grad=True), [torch.zeros(())]
        optimizer = torch.optim.SGD([theta], lr=0.05)
        loss = ClippedPolicyLoss(sampler_correction=correction)
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            normal, chi = torch.randn(8, generator=generator), torch.randn(2, 8, generator=generator).square().mean(0)
            served = self.logprobs(past[max(0, len(past) - 1 - self.stale_by)]) / self.temperature
            sampler = (served + self.noise * normal / chi.sqrt().clamp(min=0.05)).log_softmax(0)
            often = sampler[self.pairs].sum(1).exp()
            advantages = 64 * often * (self.returns - (often * self.returns).sum())
            now = self.logprobs(theta)
            batch = replace(
                self.batch,
                advantages=advantages,
                old_logprobs=now.detach()[self.pairs].flatten(),
                sampler_logprobs=sampler[self.pairs].flatten(),
            )
            optimizer.zero_grad()
            loss(now[self.pairs].flatten(), batch).per_rollout_loss.mean().backward()
            optimizer.step()
            past.append(theta.detach().clone())
        return theta.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "gap",
    [{"temperature": 1.5}, {"stale_by": 5}, {"noise": 0.3}, {"temperature": 1.5, "stale_by": 3, "noise": 0.1}],
    ids=lambda gap: "+".join(gap),
)
def test_on_a_sampler_that_is_off_the_plain_update_drifts_and_the_corrected_one_does_not(gap):
    """The plain update makes the sampler's return as good as it gets, not the policy's; weights of tokens take away
    part of that, weights of sequences all of it."""
    simulated = Simulated(**gap)
    corrections = (None, TruncatedWeights(cap=5.0), TruncatedWeights("sequence", cap=5.0))
    plain, token, sequence = (abs(simulated.trained(each) - Simulated.optimum) for each in corrections)
    assert plain > 0.08
    assert token < 0.7 * plain
    assert sequence < 0.01


@pytest.mark.slow
def test_without_a_gap_no_correction_changes_where_training_ends():
    ends = [Simulated().trained(each) for each in (None, *(CORRECTIONS[name] for name in ("truncated", "mask", "tv")))]
    assert ends == pytest.approx([Simulated.optimum] * 4, abs=0.002)


def test_a_config_names_the_correction_within_its_loss():
    loss = {
        "_component_": "loop_recipes.algorithm.losses.Reinforce",
        "sampler_correction": {"_component_": f"{HERE}.TruncatedWeights", "cap": 3.0},
    }
    check_component("loss", loss)
    assert build(loss).sampler_correction == TruncatedWeights("token", 3.0)
    with pytest.raises(ConfigError, match=r"unknown key 'loss\.sampler_correction\.cup'"):
        check_component("loss", {**loss, "sampler_correction": {"_component_": f"{HERE}.RatioMask", "cup": 3.0}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RatioMask(low=2.0, high=1.0), "0 <= low < high"),
        (lambda: ClippedPolicyLoss("turn", sampler_correction=RatioMask()), "needs one with ratio_of: sequence"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_old_logprobs_are_needed():
    batch = replace(collate_step(make_samples([8]), 0, packed=True), old_logprobs=None)
    with pytest.raises(ValueError, match="needs the learner's log-probs"):
        Reinforce(sampler_correction=TruncatedWeights())(torch.zeros(len(batch.targets)), batch)
