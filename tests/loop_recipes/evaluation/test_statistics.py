"""The statistics on simulated data: intervals cover, and the test rejects no more often than it may."""

import numpy as np
import pytest

from appworld_adapter.dataset import scenario_of
from loop_recipes.evaluation.statistics import difference_interval, permutation_p_value, rate_interval

SIMULATIONS = 150
# Three standard errors below 0.95: a method that covers at the stated rate fails this once in a thousand seeds.
LOWEST = 0.95 - 3 * (0.95 * 0.05 / SIMULATIONS) ** 0.5


def task_values(counts, per_scenario=3):
    """Spread solved-task counts over task ids ``s<i>_<n>``."""
    return {
        f"s{scenario}_{number + 1}": float(number < count)
        for scenario, count in enumerate(counts)
        for number in range(per_scenario)
    }


@pytest.mark.slow
@pytest.mark.parametrize("scenarios", [12, 56])
@pytest.mark.parametrize(("rate", "concentration"), [(0.1, 1.0), (0.4, 0.5), (0.7, 4.0)])
def test_rate_interval_covers_with_correlated_tasks(scenarios, rate, concentration):
    rng = np.random.default_rng(scenarios)
    covered = 0
    for simulation in range(SIMULATIONS):
        skill = rng.beta(rate * concentration, (1 - rate) * concentration, size=scenarios)
        interval = rate_interval(task_values(rng.binomial(3, skill)), scenario_of, resamples=1000, seed=simulation)
        covered += interval.low <= rate <= interval.high
    assert covered / SIMULATIONS >= LOWEST


def test_rate_interval_is_not_needlessly_wide():
    rng = np.random.default_rng(1)
    widths = []
    for simulation in range(20):
        interval = rate_interval(
            {f"s{task}_1": float(rng.random() < 0.5) for task in range(100)},
            scenario_of,
            resamples=1000,
            seed=simulation,
        )
        widths.append(interval.high - interval.low)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 0.5 / 10, rel=0.1)  # the normal interval of 100 coin flips


@pytest.mark.slow
@pytest.mark.parametrize("scenarios", [12, 40])
@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_difference_interval_covers(scenarios, gain):
    rng = np.random.default_rng(scenarios + 1)
    rate, covered = 0.4, 0
    for simulation in range(SIMULATIONS):
        before = rng.beta(rate, 1 - rate, size=scenarios)
        after = before + gain * (1 - before)
        first, second = (task_values(rng.binomial(3, skill)) for skill in (before, after))
        differences = {task: second[task] - first[task] for task in first}
        interval = difference_interval(differences, scenario_of, resamples=1000, seed=simulation)
        covered += interval.low <= gain * (1 - rate) <= interval.high
    assert covered / SIMULATIONS >= LOWEST


@pytest.mark.parametrize("scenarios", [8, 30])  # enumerated, sampled
def test_permutation_test_keeps_its_level_and_finds_a_large_effect(scenarios):
    rng = np.random.default_rng(scenarios)
    null = []
    for simulation in range(SIMULATIONS):
        skill = rng.beta(1, 1, size=scenarios)
        first, second = (task_values(rng.binomial(3, skill)) for _ in range(2))
        differences = {task: second[task] - first[task] for task in first}
        null.append(permutation_p_value(differences, scenario_of, permutations=500, seed=simulation))
    assert np.mean(np.array(null) <= 0.05) <= 0.05 + 3 * (0.05 * 0.95 / SIMULATIONS) ** 0.5
    assert permutation_p_value(task_values([3] * scenarios), scenario_of) < 0.01


def test_permutation_test_by_hand():
    # Cluster sums 2, 1, -1 total 2; the patterns give 2, 4, 0, 2 and their negatives: 6 of 8 reach 2.
    differences = {"a_1": 1.0, "a_2": 1.0, "b_1": 1.0, "c_1": -1.0}
    assert permutation_p_value(differences, scenario_of) == pytest.approx(6 / 8)
    assert permutation_p_value({"a_1": 0.0, "b_1": 0.0}, scenario_of) == 1.0


def test_nothing_solved_still_has_an_upper_end():
    interval = rate_interval(dict.fromkeys(task_values([0] * 16), 0.0), scenario_of)
    assert (interval.estimate, interval.low) == (0.0, 0.0)
    assert 0.1 < interval.high < 0.35
    everything = rate_interval(dict.fromkeys(task_values([0] * 16), 1.0), scenario_of)
    assert (everything.estimate, everything.high) == (1.0, 1.0)


def test_the_same_seed_gives_the_same_interval():
    values = task_values([0, 1, 2, 3, 3])
    assert rate_interval(values, scenario_of, seed=3) == rate_interval(values, scenario_of, seed=3)
    assert rate_interval(values, scenario_of).scaled(100).estimate == pytest.approx(60.0)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="at least one"):
        rate_interval({}, scenario_of)
    with pytest.raises(ValueError, match="a_1"):
        rate_interval({"a_1": 1.5}, scenario_of)
