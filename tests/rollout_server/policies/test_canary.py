"""The canary on simulated bf16 noise: it bears single tokens that are far off, and finds weights that are not meant.

Statistical: the noise has the published shape (standard deviation 0.01, about 0.5 at most in 3,916 tokens), and
versions differ on a third of the tokens by 0.05 in the mean, as after some optimizer steps.
"""

import numpy as np

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
