"""The canary on simulated bf16 noise: it bears single tokens that are far off, and finds weights that are not meant.

Statistical: the noise has the published shape (standard deviation 0.01, about 0.5 at most in 3,916 tokens), and
versions differ on a third of the tokens by 0.05 in the mean, as after some optimizer steps.
"""

from dataclasses import replace

import numpy as np
import pytest

from rollout_server.policies.canary import Canary

TOKENS = 512
GAP = {"tolerance": 0.5, "mean_tolerance": 0.1}  # sampler_gap of the bf16 configs


def noise(draw):
    far = draw.random(TOKENS) < 0.003
    return np.where(far, draw.laplace(0.0, 0.12, TOKENS), draw.normal(0.0, 0.008, TOKENS))


def step(draw):
    return np.where(draw.random(TOKENS) < 1 / 3, draw.laplace(0.0, 0.05, TOKENS), 0.0)


def trial(draw):
    """A canary, and the log-probs of the base model, of the version before and of the version meant."""
    base = -draw.exponential(0.5, TOKENS)
    before = base + step(draw)
    meant = before + step(draw)
    canary = Canary(
        list(range(TOKENS + 1)),
        list(range(1, TOKENS + 1)),
        meant.tolist(),
        **GAP,
        others=(before.tolist(), base.tolist()),
    )
    return canary, base, before, meant


def test_the_noise_is_as_published():
    draws = np.concatenate([noise(np.random.default_rng(seed)) for seed in range(400)])
    assert 0.009 < draws.std() < 0.014
    assert 0.3 < np.median(np.abs(draws[: 26 * 3916]).reshape(26, 3916).max(1)) < 0.6


def test_no_false_alarm_in_ten_thousand_publications():
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(10_000):
        canary, _, _, meant = trial(draw)
        refused += canary.objection((meant + noise(draw)).tolist()) is not None
    assert refused == 0


def test_other_weights_are_found():
    """Another version, no adapter, and a prefix cache of the version before, of all whole blocks of 16 tokens."""
    draw = np.random.default_rng(1)
    found = np.zeros(3)
    for _ in range(1000):
        canary, base, before, meant = trial(draw)
        stale = np.where(np.arange(TOKENS) < TOKENS - 16, before, meant)
        served = (before, base, stale)
        found += [canary.objection((logprobs + noise(draw)).tolist()) is not None for logprobs in served]
    assert (found >= 990).all(), found


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_an_adapter_that_does_half_of_what_it_should_is_found(share):
    """Or half as much again: also after a first step, whose whole effect is as large as the noise."""
    draw = np.random.default_rng(2)
    found = 0
    for _ in range(200):
        base = -draw.exponential(0.5, TOKENS)
        change = draw.normal(0.0, 0.02, TOKENS)
        numbers = list(range(TOKENS + 1))
        canary = Canary(numbers, numbers[1:], (base + change).tolist(), **GAP, others=(base.tolist(),) * 2)
        assert canary.objection((base + change + noise(draw)).tolist()) is None
        objection = canary.objection((base + share * change + noise(draw)).tolist())
        found += objection is not None and " of the change from another version" in objection
    assert found >= 198, found


def test_rows_in_another_order_pass_the_bounds_and_are_found_by_what_they_change(tmp_path):
    """Llama as torchtune builds it, its queries and keys exported as they are: bounds of half precision let it pass."""
    from support.scrambled_llama import logprobs

    draw = np.random.default_rng(3)
    base, meant, scrambled = logprobs(tmp_path, TOKENS)
    numbers = list(range(TOKENS + 1))
    canary = Canary(numbers, numbers[1:], meant.tolist(), **GAP, others=(base.tolist(),) * 2)
    assert replace(canary, others=()).objection((scrambled + noise(draw)).tolist()) is None
    assert " of the change from another version" in canary.objection((scrambled + noise(draw)).tolist())
    assert canary.objection((meant + noise(draw)).tolist()) is None
