"""Micro-batches: what goes where, and that splitting, padding, packing and ranks change no loss and no gradient."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_recipes.algorithm.losses import ClippedPolicyLoss
from loop_recipes.engine import batching
from loop_recipes.engine.batching import BatchLayout, Documents, collate, collate_step, micro_batches, step_batches
from loop_recipes.engine.samples import credited
from loop_recipes.engine.sequence_parallel import RowPart
from support.learner_cases import VOCAB, adapter_gradient, make_samples, tiny_decoder

many_lengths = st.lists(st.integers(4, 60), min_size=1, max_size=14)


@pytest.mark.parametrize("packed", [False, True])
@given(lengths=st.lists(st.integers(4, 40), min_size=1, max_size=6), seed=st.integers(0, 2**20))
@settings(max_examples=40)
def test_collate_points_at_the_right_tokens(packed, lengths, seed):
    samples = make_samples(lengths, seed)
    batch = collate_step(samples, pad_id=VOCAB - 1, packed=packed)
    flat_tokens, flat_positions = batch.tokens.flatten(), batch.input_pos.flatten()
    position = 0
    for number, sample in enumerate(samples):
        for i in sample.mask.nonzero().flatten().tolist():
            assert batch.targets[position] == sample.token_ids[i]
            assert flat_tokens[batch.rows[position]] == sample.token_ids[i - 1]
            assert flat_positions[batch.rows[position]] == i - 1
            assert batch.rollout_index[position] == number
            assert batch.turn_rollout[batch.turn_index[position]] == number
            position += 1
    assert position == len(batch.targets) == len(batch.old_logprobs)
    turns = [len(set(s.turn_ids[s.mask].tolist())) for s in samples]
    assert torch.bincount(batch.turn_rollout).tolist() == turns
    assert batch.documents == (Documents.of(lengths) if packed else None)
    pieces = batch.split(batch.old_logprobs)
    assert all(torch.equal(pieces[s.rollout_id], s.old_logprobs) for s in samples)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_part_of_a_row_points_at_its_own_tokens_and_all_parts_at_all(ranks):
    """As ranks that share a row have it: the token before each target is in the part that says it owns the target."""
    samples = make_samples([17, 9, 31])
    owned = []
    for index in range(ranks):
        part = collate_step(samples, pad_id=VOCAB - 1, packed=True, part=RowPart(index, ranks))
        before = torch.cat([sample.token_ids[sample.mask.nonzero()[:, 0] - 1] for sample in samples])
        assert torch.equal(part.tokens.flatten()[part.rows], before[part.own])
        assert 0 < len(part.own) < len(part.targets)
        owned += part.own.tolist()
    assert sorted(owned) == list(range(len(before)))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@given(lengths=many_lengths, world_size=st.integers(1, 8), budget=st.integers(10, 150))
@settings(max_examples=60)
def test_every_rank_makes_the_same_number_of_calls_and_no_rollout_is_lost(packed, lengths, world_size, budget):
    samples = make_samples(lengths)
    batches = [micro_batches(samples, BatchLayout(budget, packed, world_size, rank)) for rank in range(world_size)]
    assert len({len(rank) for rank in batches}) == 1
    ids = [rollout for rank in batches for batch in rank for rollout in batch.rollout_ids]
    assert sorted(ids) == sorted(sample.rollout_id for sample in samples)


def loss_and_gradient(model, batches):
    model.zero_grad()
    total, per_rollout = 0.0, {}
    loss = ClippedPolicyLoss()
    for batch in batches:
        output = loss(model(**batch.inputs()).logprobs, batch)
        output.per_rollout_loss.sum().backward()
        total += output.per_rollout_loss.sum().item()
        per_rollout |= dict(zip(batch.rollout_ids, output.per_rollout_loss.tolist(), strict=True))
    return total, adapter_gradient(model).clone(), per_rollout


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_any_budget_padded_or_packed_gives_one_loss_and_gradient(tied):
    model = tiny_decoder(tied, token_tile=16, vocab_tile=32)
    samples = make_samples([31, 9, 50, 17, 5, 26, 44])
    expected, gradient, per_rollout = loss_and_gradient(model, [collate_step([s], 0, False) for s in samples])
    assert gradient.abs().max() > 1e-3
    for packed in (False, True):
        for budget in (1, 60, 75, 120, 400):
            batches = [*step_batches(samples, BatchLayout(budget, packed, pad_id=3)), collate_step([], 3, packed)]
            total, other, values = loss_and_gradient(model, batches)
            assert total == pytest.approx(expected, abs=2e-5)
            assert values == pytest.approx(per_rollout, abs=2e-5)
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_neighbours_in_a_packed_row_do_not_leak():
    """Changing every token of one rollout leaves the log-probs and input gradients of the others bit for bit."""
    model = tiny_decoder()
    samples = make_samples([20, 33, 14])
    changed = replace(samples[1], token_ids=(samples[1].token_ids + 1) % VOCAB)
    before = collate(samples, 0, packed=True)
    after = collate([samples[0], changed, samples[2]], 0, packed=True)
    with torch.no_grad():
        first, second = before.split(model(**before.inputs()).logprobs), after.split(model(**after.inputs()).logprobs)
    assert torch.equal(first["rollout-0"], second["rollout-0"])
    assert torch.equal(first["rollout-2"], second["rollout-2"])
    assert not torch.allclose(first["rollout-1"], second["rollout-1"])

    embedded = []
    hook = model.tok_embeddings.register_forward_hook(
        lambda *call: embedded.append(call[2].requires_grad_()) or call[2]
    )
    before.split(model(**before.inputs()).logprobs)["rollout-1"].sum().backward()
    hook.remove()
    reached = embedded[0].grad[0].abs().sum(-1) > 0
    assert not reached[:20].any()
    assert not reached[53:].any()
    assert reached[20:52].any()


@pytest.mark.slow
def test_padding_is_never_seen():
    model = tiny_decoder()
    samples = make_samples([20, 33, 14])
    with torch.no_grad():
        results = [model(**collate(samples, pad, packed=False).inputs()).logprobs for pad in (0, 55)]
    assert torch.equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_changed_observation_token_only_reaches_its_successors(packed):
    """No loss term is its own; sampled tokens before it keep their log-prob, those after it see another context."""
    model = tiny_decoder()
    samples = make_samples([40, 25])
    sampled = samples[0].mask.nonzero().flatten()
    observation = next(i for i in range(10, 40) if not samples[0].mask[i] and int(sampled[-1]) > i)
    tokens = samples[0].token_ids.clone()
    tokens[observation] = (tokens[observation] + 1) % VOCAB
    before = collate(samples, 0, packed)
    after = collate([replace(samples[0], token_ids=tokens), samples[1]], 0, packed)
    assert torch.equal(before.targets, after.targets)
    assert torch.equal(before.rows, after.rows)
    with torch.no_grad():
        first, second = before.split(model(**before.inputs()).logprobs), after.split(model(**after.inputs()).logprobs)
    same = first["rollout-0"] == second["rollout-0"]
    assert same[sampled < observation].all()
    assert not same[sampled > observation].any()
    assert torch.equal(first["rollout-1"], second["rollout-1"])


def test_the_plan_of_several_ranks_is_rank_0s(monkeypatch):
    """Which rounds as it does: no other rank computes one."""
    samples, other = make_samples([20, 30, 25, 28]), [[[3], [0]], [[2, 1], []]]
    monkeypatch.setattr(batching, "on_main_rank", lambda _: other)
    ids = [[batch.rollout_ids for batch in step_batches(samples, BatchLayout(60, True, 2, rank))] for rank in (0, 1)]
    assert ids == [[("rollout-3",), ("rollout-2", "rollout-1")], [("rollout-0",), ()]]
    [alone] = step_batches(samples, BatchLayout(200, True))
    assert len(alone.rollout_ids) == 4


def test_errors_name_the_cause():
    samples = make_samples([20, 30])
    with pytest.raises(ValueError, match="token_budget must be at least 1"):
        micro_batches(samples, BatchLayout(0, packed=False))
    with pytest.raises(ValueError, match="rollout-1 has no old_logprobs"):
        collate_step([samples[0], credited(samples[1:], 1.0)[0]], 0, packed=False)
