"""What an episode's sequences have in common is computed once, and changes no log-prob, loss or gradient."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_recipes.algorithm.losses import ClippedPolicyLoss
from loop_recipes.engine.batching import BatchLayout, collate, collate_step, micro_batches, step_batches
from loop_recipes.engine.shared_prefixes import MOST_KEYS, Keys, lay_out, units
from support.learner_cases import adapter_gradient, flash_attention, make_episodes, make_samples, tiny_decoder
from support.on_cuda import as_on_cuda

texts = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=8)


def sequences(texts, episode="one"):
    """A sample of each text, of which all but the first token are sampled."""
    like = make_samples([2])[0]
    return [
        replace(
            like,
            rollout_id=f"{episode}.{number}",
            episode_id=episode,
            token_ids=torch.tensor(ids),
            mask=torch.arange(len(ids)) > 0,
            turn_ids=torch.where(torch.arange(len(ids)) > 0, 0, -1),
            **{name: torch.zeros(len(ids) - 1) for name in ("sampler_logprobs", "old_logprobs")},
            policy_versions=torch.zeros(len(ids) - 1, dtype=torch.long),
        )
        for number, ids in enumerate(texts)
    ]


def beginnings(samples):
    """How many different beginnings these have, of all lengths: what a row of them must compute."""
    every = [(sample.episode, *sample.token_ids.tolist()) for sample in samples]
    return len({ids[:end] for ids in every for end in range(2, len(ids) + 1)})


@given(one=texts, other=texts)
@settings(max_examples=60)
def test_each_beginning_stands_once_and_is_seen_by_all_that_go_on_from_it(one, other):
    samples = sequences(one, "one") + sequences(other, "other")
    batch = collate(samples, pad_id=7, packed=True)
    assert batch.tokens.shape == (1, beginnings(samples))
    for piece in lay_out(samples):
        ids = samples[piece.number].token_ids
        assert torch.equal(batch.tokens[0, piece.places], ids)
        assert torch.equal(batch.input_pos[0, piece.places], torch.arange(len(ids)))
    assert torch.equal(batch.targets, torch.cat([sample.token_ids[1:] for sample in samples]))
    assert torch.equal(batch.tokens[0, batch.rows], torch.cat([sample.token_ids[:-1] for sample in samples]))
    if batch.documents.keys is not None:
        queries, keys = (places.tolist() for places in (batch.documents.borders, batch.documents.keys.borders))
        for (first, end), (start, last) in zip(pairwise(queries), pairwise(keys), strict=True):
            assert batch.documents.keys.places[start:last].tolist()[first - end :] == list(range(first, end))


@given(texts=st.lists(texts, min_size=1, max_size=4), budget=st.integers(1, 40))
@settings(max_examples=60)
def test_a_unit_keeps_to_the_budget_and_no_sequence_is_lost(texts, budget):
    samples = [sample for number, each in enumerate(texts) for sample in sequences(each, f"e{number}")]
    found = units(samples, budget)
    assert sorted(sample.rollout_id for unit, _ in found for sample in unit) == sorted(s.rollout_id for s in samples)
    for unit, tokens in found:
        assert tokens == beginnings(unit) == collate(unit, 0, packed=True).tokens.shape[1]
        assert len({sample.episode for sample in unit}) == 1
        assert len(unit) == 1 or tokens <= budget
        assert sum(sample.tokens for sample in unit) <= MOST_KEYS * tokens


def test_episodes_of_one_sequence_are_planned_and_laid_out_as_ever():
    samples = make_samples([31, 9, 50, 17])
    assert units(samples, 60) == [([sample], sample.tokens) for sample in samples]
    documents = collate(samples, 0, packed=True).documents
    assert documents.lengths == (31, 9, 50, 17)
    assert documents.keys is None


def results(model, batches):
    """Loss, gradient, and the log-probs of each rollout."""
    model.zero_grad()
    total, logprobs = 0.0, {}
    for batch in batches:
        found = model(**batch.inputs()).logprobs
        loss = ClippedPolicyLoss("turn")(found, batch).per_rollout_loss.sum()
        loss.backward()
        total += loss.item()
        logprobs |= batch.split(found.detach())
    return total, adapter_gradient(model).clone(), logprobs


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize(("budget", "sequences_alone"), [(1, True), (40, False), (500, False)])
def test_any_budget_gives_the_loss_and_gradient_of_sequences_one_by_one(on_cuda, budget, sequences_alone):
    samples = make_episodes([5, 1, 4])
    model = tiny_decoder(token_tile=16, vocab_tile=32)
    total, gradient, logprobs = results(model, [collate_step([sample], 0, packed=False) for sample in samples])
    batches = step_batches(samples, BatchLayout(budget, packed=True))
    computed = sum(batch.tokens.numel() for batch in batches)
    assert (computed == sum(sample.tokens for sample in samples)) == sequences_alone
    if budget == 500:
        assert (computed, sum(sample.tokens for sample in samples)) == (beginnings(samples), 269) == (164, 269)

    with as_on_cuda(varlen_attn=flash_attention) if on_cuda else nullcontext():
        found = results(model, batches)
    assert found[0] == pytest.approx(total, abs=2e-5)
    torch.testing.assert_close(found[1], gradient, rtol=1e-4, atol=2e-6)
    for name, expected in logprobs.items():
        torch.testing.assert_close(found[2][name], expected, rtol=0, atol=1e-5)


def test_what_many_attend_to_gets_the_sum_of_their_gradients_in_half_precision():
    """In bf16 256 + 1 is 256."""
    row = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    Keys.of([torch.zeros(600, dtype=torch.long)]).take(row).sum().backward()
    assert row.grad.tolist() == [[600.0, 600.0]]


@given(turns=st.lists(st.integers(1, 6), min_size=1, max_size=5), ranks=st.integers(1, 4), budget=st.integers(20, 200))
@settings(max_examples=30)
def test_ranks_make_equally_many_calls_and_lose_nothing(turns, ranks, budget):
    samples = make_episodes(turns)
    batches = [micro_batches(samples, BatchLayout(budget, True, ranks, rank)) for rank in range(ranks)]
    assert len({len(rank) for rank in batches}) == 1
    ids = [rollout for rank in batches for batch in rank for rollout in batch.rollout_ids]
    assert sorted(ids) == sorted(sample.rollout_id for sample in samples)


@pytest.mark.fault("tokens a second of sequences that begin alike")
@given(one=texts, other=texts)
@settings(max_examples=30)
def test_tokens_are_counted_as_often_as_they_are_computed(one, other):
    """By hand: what a row of each unit must compute; without sharing, all."""
    from loop_recipes.engine.batching import computed

    samples = sequences(one, "one") + sequences(other, "other")
    counted = computed(samples, BatchLayout(30, True))
    rows = [batch.tokens.shape[1] for batch in (collate(unit, 7, True) for unit, _ in units(samples, 30))]
    assert sum(tokens - shared for tokens, shared in counted) == sum(rows)
    assert sorted(tokens for tokens, _ in counted) == sorted(sample.tokens for sample in samples)
    assert computed(samples, BatchLayout(30, False)) == [(sample.tokens, 0) for sample in samples]
