"""The advantage of a rollout, spread over its turns: by the formula, turn by turn, in Python floats."""

import statistics

import pytest
import torch

from loop_contrib.turn_credit.spread import spread
from support.learner_cases import make_samples


def credits_of(samples):
    generator = torch.Generator().manual_seed(7)
    return {sample.rollout_id: torch.randn(sample.turns, generator=generator) for sample in samples}


@pytest.mark.parametrize("same_scale", [True, False])
def test_each_token_gets_its_turns_share_and_the_rollout_keeps_its_mean(same_scale):
    samples = make_samples([33, 41, 27, 38])
    credits = credits_of(samples)
    centred = {}
    for sample in samples:
        token_credits = [credits[sample.rollout_id][turn].item() for turn in sample.turn_ids[sample.mask].tolist()]
        centred[sample.rollout_id] = [value - statistics.fmean(token_credits) for value in token_credits]
    scale = 1.0
    if same_scale:
        own = [sample.advantage for sample in samples for _ in centred[sample.rollout_id]]
        scale = statistics.pstdev(own) / statistics.pstdev([v for values in centred.values() for v in values])
    for sample, result in zip(samples, spread(samples, credits, 0.5, same_scale), strict=True):
        expected = [sample.advantage + 0.5 * scale * value for value in centred[sample.rollout_id]]
        assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert result.mean().item() == pytest.approx(sample.advantage, abs=1e-6)


def test_a_rollout_without_credits_and_one_of_a_single_turn_keep_their_advantage():
    samples = make_samples([33, 41])
    without = spread(samples, {samples[0].rollout_id: torch.full((samples[0].turns,), 3.0)}, 1.0, same_scale=False)
    for sample, result in zip(samples, without, strict=True):
        assert result.tolist() == pytest.approx([sample.advantage] * int(sample.mask.sum()))
    assert spread([], {}, 1.0, same_scale=True) == []


def test_credits_that_do_not_differ_change_nothing():
    samples = make_samples([33, 41])
    alike = {sample.rollout_id: torch.ones(sample.turns) for sample in samples}
    for sample, result in zip(samples, spread(samples, alike, 1.0, same_scale=True), strict=True):
        assert result.tolist() == pytest.approx([sample.advantage] * int(sample.mask.sum()))
