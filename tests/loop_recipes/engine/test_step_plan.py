"""Plans of a step over all ranks: nothing lost, within the budget, and how much of the ranks' time is used."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_recipes.engine import step_plan
from loop_recipes.engine.step_plan import cost, plan_micro_batches, plan_step, step_efficiency

many_lengths = st.lists(st.integers(4, 60), min_size=1, max_size=14)


@pytest.mark.parametrize("packed", [False, True])
@given(lengths=many_lengths, budget=st.integers(1, 200))
@settings(max_examples=80)
def test_a_plan_uses_every_rollout_once_and_keeps_to_the_budget(packed, lengths, budget):
    plan = plan_micro_batches(lengths, budget, packed)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    for part in plan:
        used = [lengths[i] for i in part]
        tokens = sum(used) if packed else max(used) * len(used)
        assert tokens <= budget or len(part) == 1


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@given(lengths=many_lengths, world_size=st.integers(1, 8), budget=st.integers(10, 150))
@settings(max_examples=40)
def test_a_step_of_several_ranks_does_too_and_is_the_same_each_time(packed, lengths, world_size, budget):
    plan = plan_step(lengths, world_size, budget, packed)
    assert plan == plan_step(lengths, world_size, budget, packed)
    assert {len(call) for call in plan} == {world_size}
    assert all(any(call) for call in plan), "no call in which every rank is idle"
    assert sorted(i for call in plan for part in call for i in part) == list(range(len(lengths)))
    for part in (part for call in plan for part in call if len(part) > 1):
        used = [lengths[i] for i in part]
        assert (sum(used) if packed else max(used) * len(used)) <= budget
    assert 0 < step_efficiency(plan, lengths) <= 1 + 1e-9


def test_one_rank_packs_first_fit_longest_first():
    lengths = [50, 10, 40, 60, 30]
    assert plan_step(lengths, 1, 100, packed=True) == [[[3, 2]], [[0, 4, 1]]]


def test_the_largest_micro_batch_comes_first():
    lengths = drawn(12_000, 64, 1)
    plan = plan_step(lengths, 8, 32_768, True)
    sizes = [max(sum(lengths[i] for i in part) for part in call) for call in plan]
    assert sizes == sorted(sizes, reverse=True)


def drawn(median, rollouts, seed):
    """Log-normal lengths as agent episodes have them, up to a context of 32,000 tokens."""
    draw = random.Random(seed)
    return [int(min(32_000, max(1_500, median * math.exp(0.5 * draw.gauss(0, 1))))) for _ in range(rollouts)]


@pytest.mark.slow
@pytest.mark.parametrize("median", [8_000, 12_000, 16_000, 22_000])
def test_planning_over_all_ranks_beats_packing_rank_by_rank(median):
    """Eight ranks, budget 32,768: minibatches of 32 rollouts, and a whole collection of 216."""
    before, after = [], []
    for seed in range(3):
        lengths = drawn(median, 32, seed)
        before.append(step_efficiency(step_plan._dealt(lengths, 8, 32_768, True), lengths))
        after.append(step_efficiency(plan_step(lengths, 8, 32_768, True), lengths))
        assert after[-1] >= before[-1]
    assert sum(after) > sum(before) + 3 * 0.03
    lengths = drawn(median, 216, 0)
    assert step_efficiency(plan_step(lengths, 8, 32_768, True), lengths) > 0.97


def test_efficiency_is_the_mean_over_the_costliest():
    lengths = [100, 100, 50]
    expected = sum(map(cost, lengths)) / (2 * (cost(100) + cost(50)))
    assert step_efficiency([[[0], [1]], [[2], []]], lengths) == pytest.approx(expected)
