"""Pairs and their losses against -log sigmoid, differentiated in plain float64 through both rollouts of a pair."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from loop_contrib.sweet_rl.turn_critic import TurnAdvantage
from loop_formats.ids import segment_id
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.preferences import DMPO, DPO, ReturnPairs
from loop_recipes.config.components import check_component
from loop_recipes.engine.batching import BatchLayout, collate_step, micro_batches, step_batches
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from support.learner_cases import adapter_gradient, as_pairs, make_samples, tiny_lora_model
from support.small_runs import replay_config, train

LOSSES = {
    "dpo": DPO(0.3),
    "dpo_nll": DPO(0.3, nll=0.2),
    "dmpo": DMPO(0.3, 0.7),
    "dmpo_1": DMPO(0.3, 1.0),
    "critic": TurnAdvantage(0.3, nll=0.1),
    "critic_sum": TurnAdvantage(0.3, nll=0.0, per_turn="sum"),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def turn_weight(loss, turn, turns, tokens=1):
    """phi of one of a turn's tokens by the papers' formulas, in Python floats."""
    if isinstance(loss, TurnAdvantage):
        return 1.0 / tokens if loss.per_turn == "mean" else 1.0
    if isinstance(loss, DPO):
        return 1.0
    if loss.gamma == 1.0:
        return (turns - turn) / turns
    return loss.gamma**turn * (1 - loss.gamma ** (turns - turn)) / (1 - loss.gamma**turns)


def pair_losses(loss, samples, logprobs):
    """-log sigmoid(Delta) of each pair and the chosen one's cross-entropy, with autograd through both rollouts."""
    total, added = {}, {}
    for sample in samples:
        turns = sample.turn_ids[sample.mask].tolist()
        phi = [turn_weight(loss, turn, max(turns) + 1, turns.count(turn)) for turn in turns]
        moved = logprobs[sample.rollout_id] - sample.old_logprobs.double()
        delta = sample.advantage * loss.beta * (torch.tensor(phi, dtype=torch.float64) * moved).sum()
        total[sample.pair] = total.get(sample.pair, 0.0) + delta
        if sample.advantage > 0:
            added[sample.pair] = -loss.nll * logprobs[sample.rollout_id].sum() / len(turns)
    return {pair: added[pair] - torch.log(1 / (1 + torch.exp(-delta))) for pair, delta in total.items()}


def pairs_of(lengths, seed=0):
    samples = make_samples(lengths, seed)
    return as_pairs(samples, [(i, i + 1) for i in range(0, len(samples), 2)])


@every_loss
@given(lengths=st.lists(st.integers(4, 30), min_size=2, max_size=6), seed=st.integers(0, 2**20))
@settings(max_examples=25)
def test_weighted_log_likelihood_has_the_pairs_gradient(loss, lengths, seed):
    samples = pairs_of(lengths[: len(lengths) // 2 * 2], seed)
    generator = torch.Generator().manual_seed(seed)
    logprobs = {
        s.rollout_id: (s.old_logprobs.double() + torch.randn(len(s.old_logprobs), generator=generator).double())
        for s in samples
    }
    leaves = {name: values.clone().requires_grad_() for name, values in logprobs.items()}
    expected = pair_losses(loss, samples, leaves)
    sum(expected.values()).backward()

    preferences = loss.compare(samples, logprobs)
    torch.testing.assert_close(preferences.losses, torch.stack(list(expected.values())).detach())
    weighted = preferences.weighted(samples)
    batch = collate_step(weighted, pad_id=0, packed=True)
    new = torch.cat([logprobs[s.rollout_id] for s in samples]).float().requires_grad_()
    loss(new, batch).per_rollout_loss.sum().backward()
    torch.testing.assert_close(
        new.grad.double(), torch.cat([leaves[s.rollout_id].grad for s in samples]), rtol=1e-5, atol=1e-7
    )


@every_loss
def test_an_episode_of_several_sequences_weighs_as_one_of_the_same_turns(loss):
    """Each turn as a sequence of its own, whose log-probs are what they were in the whole."""
    whole = pairs_of([33, 41, 27, 38])
    parts = [
        replace(
            sample.only_turn(number),
            rollout_id=segment_id(sample.rollout_id, number),
            episode_id=sample.rollout_id,
            segment=number,
            old_logprobs=sample.old_logprobs[sample.turn_ids[sample.mask] == number],
        )
        for sample in whole
        for number in range(sample.turns)
    ]
    parts = as_pairs(parts, [(0, 1), (2, 3)])
    logprobs = {s.rollout_id: s.old_logprobs + torch.linspace(-0.5, 0.7, len(s.old_logprobs)) for s in whole}
    own = {
        segment_id(s.rollout_id, n): logprobs[s.rollout_id][s.turn_ids[s.mask] == n]
        for s in whole
        for n in range(s.turns)
    }
    expected, found = loss.compare(whole, logprobs), loss.compare(parts, own)
    assert len(parts) > len(whole)
    torch.testing.assert_close(found.metrics["preference_margin"], expected.metrics["preference_margin"])
    for sample in whole:
        weights = [found.weights[segment_id(sample.rollout_id, number)] for number in range(sample.turns)]
        torch.testing.assert_close(torch.cat(weights), expected.weights[sample.rollout_id])


@pytest.mark.parametrize("packed", [True, False])
@every_loss
def test_a_models_gradient_equals_autograd_over_both_rollouts(loss, packed):
    """The adapter's gradient, in float32 through micro-batches that tear pairs apart, against float64 pair by pair."""
    samples = pairs_of([33, 41, 27, 38])
    plain = tiny_lora_model(tied=True).double()
    logprobs = {}
    for sample in samples:
        logits = plain(sample.token_ids[None])[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        logprobs[sample.rollout_id] = chosen[sample.mask[1:]]
    sum(pair_losses(loss, samples, logprobs).values()).backward()

    model = attach_head(tiny_lora_model(tied=True), TiledLogProbs(16, 32))
    batches = micro_batches(samples, BatchLayout(80, packed))
    assert any(len({s.pair for s in samples if s.rollout_id in batch.rollout_ids}) > 1 for batch in batches)
    with torch.no_grad():
        computed = {k: v for batch in batches for k, v in batch.split(model(**batch.inputs()).logprobs).items()}
    for batch in step_batches(loss.compare(samples, computed).weighted(samples), BatchLayout(80, packed)):
        loss(model(**batch.inputs()).logprobs, batch).per_rollout_loss.sum().backward()
    torch.testing.assert_close(adapter_gradient(model).double(), adapter_gradient(plain), rtol=1e-3, atol=1e-5)


def test_dmpo_weights_fall_from_one_and_of_one_turn_it_is_dpo():
    for gamma in (0.3, 0.7, 0.999, 1.0):
        weights = DMPO(gamma=gamma).turn_weights(5).tolist()
        assert weights == pytest.approx([turn_weight(DMPO(gamma=gamma), t, 5) for t in range(5)])
        assert weights[0] == pytest.approx(1.0)
        assert weights == sorted(weights, reverse=True)
        assert DMPO(gamma=gamma).turn_weights(1).tolist() == pytest.approx([1.0])


def test_where_the_policy_is_the_reference_every_margin_is_zero():
    samples = pairs_of([12, 20, 15, 9])
    preferences = DPO().compare(samples, {s.rollout_id: s.old_logprobs for s in samples})
    assert preferences.metrics["preference_margin"].tolist() == [0.0, 0.0]
    assert preferences.losses.tolist() == pytest.approx([math.log(2)] * 2)


def test_best_is_paired_with_worst_and_nobody_twice():
    rewards = torch.tensor([0.5, 1.0, 0.2, 0.9, 0.4, 0.4, 0.3, 0.3])
    groups = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    assert ReturnPairs().pairs(rewards, groups) == [(1, 2), (3, 4), (0, 5)]
    assert ReturnPairs(threshold=0.2).pairs(rewards, groups) == [(1, 2), (3, 4)]
    assert ReturnPairs(per_task=1).pairs(rewards, groups) == [(1, 2)]
    assert ReturnPairs(threshold=0.2)(rewards, groups).tolist() == [0, 1, -1, 1, -1, 0, 0, 0]
    assert ReturnPairs().pairs(torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3)) == [(0, 1)]


def test_half_a_pair_is_refused():
    samples = pairs_of([10, 12])
    logprobs = {s.rollout_id: s.old_logprobs for s in samples}
    with pytest.raises(ValueError, match="must be in a pair"):
        DPO().compare(samples[:1], logprobs)
    with pytest.raises(ValueError, match="must be in a pair"):
        DPO().compare([replace(s, pair="") for s in samples], logprobs)


@pytest.mark.parametrize(
    ("component", "key", "value", "wanted"),
    [
        (DPO, "beta", 0.0, "above 0"),
        (DPO, "nll", -1.0, "at least 0"),
        (TurnAdvantage, "per_turn", "median", "mean or sum"),
        (DMPO, "gamma", 0.0, "above 0"),
        (DMPO, "gamma", 1.5, "at most 1"),
        (ReturnPairs, "threshold", -0.1, "at least 0"),
        (ReturnPairs, "per_task", 0, "at least 1"),
    ],
)
def test_bad_settings_are_refused(component, key, value, wanted):
    with pytest.raises(ConfigError, match=f"loss.{key} must be {wanted}, not "):
        check_component("loss", {"_component_": f"{component.__module__}.{component.__name__}", key: value})


PAIRS = {
    "advantage": {"_component_": "loop_recipes.algorithm.preferences.ReturnPairs", "threshold": 0.3},
    "loss": {"_component_": "loop_recipes.algorithm.preferences.DMPO", "beta": 1.0},
}


@pytest.mark.parametrize("least", [0.01, 0.0])
def test_the_recipe_learns_the_pairs_of_each_collection(tmp_path, least):
    """Also over a config whose filter lets every rollout pass: two of the twelve have no partner."""
    config = replay_config(tmp_path, iterations=2, **PAIRS)
    cfg = OmegaConf.load(config)
    cfg["update"] |= {"epochs": 8, "min_abs_advantage": least}
    train(cfg)
    for line in map(json.loads, Path(cfg.output_dir, "metrics.jsonl").read_text().splitlines()):
        assert line["steps"] == 8 * 2, "five pairs, minibatches of about 4 rollouts"
        assert line["preference_margin"] > 0
        assert line["preference_accuracy"] > 0.5
        assert line["loss"] < math.log(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": PAIRS["loss"]}, r"DMPO compares pairs of rollouts; it needs advantage\._component_="),
        (
            {**PAIRS, "update": {"loss_divisor": "tokens"}},
            r"update\.loss_divisor: tokens is a mean over tokens, and a term of .*DMPO is of a pair of rollouts",
        ),
    ],
)
def test_a_loss_on_pairs_needs_pairs_and_is_no_sum_over_tokens(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(OmegaConf.load(replay_config(tmp_path, iterations=1, **changes)))
