"""Advantages against the paper's formulas, written out in plain float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_recipes.algorithm.advantages import (
    BatchNormalized,
    LeaveOneOut,
    ReturnToGo,
    Solved,
    StdNormalized,
    TurnReturns,
    leave_one_out_by_turn,
)
from loop_recipes.engine.samples import ScoredSample

returns = st.floats(0, 1, allow_subnormal=False).map(lambda x: round(x, 4))
groups_of_returns = st.lists(st.lists(returns, min_size=2, max_size=6), min_size=1, max_size=5)


def mean(values):
    return math.fsum(values) / len(values)


def std(values):
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))


def leave_one_out(group):
    return [r - mean(group[:k] + group[k + 1 :]) for k, r in enumerate(group)]


def scaled_mean_form(group):
    size = len(group)
    return [size / (size - 1) * (r - mean(group)) for r in group]


def std_normalized(group):
    return [(r - mean(group)) / max(std(group), 1e-7) for r in group]


def leave_one_out_over_std(group):
    return [a / max(std(group), 1e-7) for a in leave_one_out(group)]


@pytest.mark.parametrize(
    ("component", "formula"),
    [
        (LeaveOneOut(), leave_one_out),
        (LeaveOneOut(), scaled_mean_form),
        (StdNormalized(), std_normalized),
        (StdNormalized(leave_one_out=True), leave_one_out_over_std),
    ],
)
@given(data=groups_of_returns, order=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_equals_the_formula_for_interleaved_groups(component, formula, data, order):
    flat = [(r, g * 7 - 3, a) for g, group in enumerate(data) for r, a in zip(group, formula(group), strict=True)]
    order.shuffle(flat)
    rewards, ids, expected = zip(*flat, strict=True)
    result = component(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("component", [LeaveOneOut(), StdNormalized(), StdNormalized(True)])
def test_a_lonely_rollout_and_equal_returns_have_no_advantage(component):
    rewards, groups = torch.tensor([0.9, 0.5, 0.5, 0.5]), torch.tensor([4, 8, 8, 8])
    assert component(rewards, groups).tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("group_baseline", [False, True])
def test_batch_normalized_has_unit_spread_over_the_batch(group_baseline):
    rewards, groups = torch.tensor([0.1, 0.4, 0.9, 1.0, 0.3]), torch.tensor([0, 0, 1, 1, 1])
    plain = rewards.tolist()
    baseline = [mean(plain[:2])] * 2 + [mean(plain[2:])] * 3 if group_baseline else [mean(plain)] * 5
    centred = [r - b for r, b in zip(plain, baseline, strict=True)]
    expected = [c / math.sqrt(mean([x * x for x in centred])) for c in centred]
    result = BatchNormalized(group_baseline=group_baseline)(rewards, groups)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def sample_with_kl(reward, kl):
    """A rollout all of whose tokens but the first are sampled, ``kl`` nats each from the reference."""
    old = torch.tensor(kl, dtype=torch.float64)
    return ScoredSample(
        rollout_id="rollout",
        task_id="task",
        token_ids=torch.arange(len(kl) + 1),
        mask=torch.arange(len(kl) + 1) > 0,
        turn_ids=torch.tensor([-1] + [0] * len(kl)),
        sampler_logprobs=torch.zeros(len(kl)),
        policy_versions=torch.zeros(len(kl), dtype=torch.long),
        reward=reward,
        advantage=0.0,
        episode_tokens=len(kl),
        episode_turns=1,
        old_logprobs=old,
        ref_logprobs=torch.zeros_like(old),
    )


@given(
    rollouts=st.lists(st.tuples(returns, st.lists(st.floats(-2, 2), min_size=1, max_size=8)), min_size=2, max_size=6),
    coefficient=st.sampled_from([0.0, 0.01, 0.5]),
)
@settings(max_examples=60)
def test_return_to_go_is_the_return_less_the_kl_that_is_to_come_normalised_over_all_tokens(rollouts, coefficient):
    to_go = [[reward - coefficient * math.fsum(kl[t:]) for t in range(len(kl))] for reward, kl in rollouts]
    tokens = [value for rollout in to_go for value in rollout]
    component = ReturnToGo(kl_coefficient=coefficient)
    results = component.token_advantages([sample_with_kl(reward, kl) for reward, kl in rollouts])
    spread = max(std(tokens), 1e-7)
    if spread < 1e-5:  # nothing but rounding
        return
    for result, rollout in zip(results, to_go, strict=True):
        expected = torch.tensor([(value - mean(tokens)) / spread for value in rollout])
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


PATHS = {
    (0,): ([0.4], 0.0),
    (1, 0): ([0.1, 0.6], 1.0),
    (1, 1, 0): ([0.1, -0.2, 0.3], 0.5),
    (1, 1, 1): ([0.1, -0.2, 0.9], 0.0),
}
"""Episodes of a world of three states: one of two actions in each turn, their rewards, the grade at the end."""


def to_go(path):
    rewards, grade = PATHS[path]
    return torch.tensor([math.fsum([*rewards[t:], grade]) for t in range(len(rewards))], dtype=torch.float64)


def expected_gradient(advantages, logits, rollouts):
    """Of the sum over a rollout's turns of A log p, in the mean over all groups that can be sampled."""
    paths = list(PATHS)
    logprobs = torch.nn.functional.logsigmoid(torch.stack([-logits, logits]))
    turns = [torch.stack([logprobs[action, t] for t, action in enumerate(path)]) for path in paths]
    chances = [each.sum().exp().item() for each in turns]
    expected = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(len(paths)), repeat=rollouts):
        chance = math.prod(chances[number] for number in group)
        values = advantages([to_go(paths[number]) for number in group])
        terms = (a @ turns[number] for a, number in zip(values, group, strict=True))
        expected = expected + chance * sum(terms) / rollouts
    return torch.autograd.grad(expected, logits)[0]


@pytest.mark.parametrize("rollouts", [2, 3])
def test_turns_have_the_exact_gradient(rollouts):
    """Over every group of rollouts, whose numbers of turns differ, in float64."""
    logits = torch.tensor([0.3, -0.4, 0.2], dtype=torch.float64, requires_grad=True)
    logprobs = torch.nn.functional.logsigmoid(torch.stack([-logits, logits]))
    value = sum(
        torch.stack([logprobs[action, t] for t, action in enumerate(path)]).sum().exp() * to_go(path)[0]
        for path in PATHS
    )
    exact = torch.autograd.grad(value, logits)[0]
    torch.testing.assert_close(
        expected_gradient(leave_one_out_by_turn, logits, rollouts), exact, rtol=1e-12, atol=1e-14
    )


def test_each_token_has_the_return_of_its_turn_less_that_of_the_others():
    def sample(path, name, segment=0, turns=slice(None), episode=""):
        rewards, grade = PATHS[path]
        own = rewards[turns]
        ids = [-1, *(t for t in range(len(own)) for _ in range(2))]
        made = sample_with_kl(grade, [0.0] * (2 * len(own)))
        return replace(
            made,
            rollout_id=name,
            episode_id=episode or name,
            segment=segment,
            turn_ids=torch.tensor(ids),
            turn_rewards=tuple(own),
        )

    short, long = (0,), (1, 1, 0)
    whole = [sample(short, "a"), sample(long, "b"), replace(sample(short, "c"), task_id="another")]
    expected = leave_one_out_by_turn([to_go(short), to_go(long)])
    got = TurnReturns().token_advantages(whole)
    assert [row.tolist() for row in got] == [
        pytest.approx(expected[0].repeat_interleave(2).tolist()),
        pytest.approx(expected[1].repeat_interleave(2).tolist()),
        [0.0, 0.0],
    ]
    parts = [sample(long, "b/1", 1, slice(1, None), "b"), sample(short, "a"), sample(long, "b", 0, slice(0, 1), "b")]
    in_parts = TurnReturns().token_advantages(parts)
    assert torch.equal(torch.cat([in_parts[2], in_parts[0]]), got[1]), "an episode in two sequences"
    cut = [replace(each, turn_ids=each.turn_ids[:3], mask=each.mask[:3]) for each in whole[:2]]
    assert torch.equal(TurnReturns().token_advantages(cut)[1], got[1][:2]), "what is cut off was earned all the same"
    (alone,) = TurnReturns(grade=0.0).token_advantages([sample(long, "b")])
    assert alone.tolist() == [0.0] * 6


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="must be vectors of one length"):
        LeaveOneOut()(torch.zeros(3), torch.zeros(2))


def test_solved_keeps_return_one_only():
    rewards = torch.tensor([1.0, 0.99, 0.0, 1.0])
    assert Solved()(rewards, torch.tensor([0, 0, 1, 1])).tolist() == [1.0, 0.0, 0.0, 1.0]
