"""experiments/algorithms.py: its tables from known metrics, which docs/results/algorithms.md shows."""

import math
import statistics

import pytest

from loop_recipes.config.files import compose
from support.experiment_scripts import load_experiment, made_up_record


@pytest.fixture(scope="module")
def algorithms():
    return load_experiment("algorithms")


def lines_of(rewards):
    lines = [{"iteration": i, "reward": r, "success": r / 2, "steps": 2} for i, r in enumerate(rewards, 1)]
    lines[-1]["dev_success"] = 0.25
    return lines


def test_means_and_intervals_over_seeds(algorithms):
    gains = [0.1, 0.2, 0.6]
    rewards = [[0.2] * 5 + [0.9] * 2 + [0.2 + gain] * 5 for gain in gains]
    seeds = [made_up_record("loop_token", seed, lines_of(own), rate=7e-4) for seed, own in enumerate(rewards)]
    text, rows = algorithms.table({"loop_token": seeds})
    half = 4.303 * statistics.stdev(gains) / math.sqrt(3)
    assert f"| 0.300 ± {half:.3f} |" in text
    assert "| LOOP (token) | 3 | 0.0007 | 24 ± 0 | 0.200 ± 0.000 | 0.500 ± " in text
    assert "| 0.250 ± 0.000 | 50.0 [" in text
    assert {"case": "ours_loop_token tiny", "metric": "reward_gain", "value": 0.3, "unit": "fraction"} in rows
    assert {row["metric"] for row in rows} == {*algorithms.COLUMNS, "tgc"}


@pytest.mark.parametrize(("seeds", "quantile"), [(5, 2.776), (11, 2.228), (14, 2.160), (30, 2.045), (80, 1.990)])
def test_the_interval_of_many_seeds_is_students_too(seeds, quantile):
    values = [float(number % 2) for number in range(seeds)]
    _, half = load_experiment("scored_runs").interval(values)
    assert half == pytest.approx(quantile * statistics.stdev(values) / math.sqrt(seeds), rel=2e-3)


def test_one_seed_has_no_interval_and_two_rates_are_not_one(algorithms):
    seeds = [made_up_record("rloo", seed, lines_of([0.5]), rate=rate) for seed, rate in enumerate((1e-3, 2e-3))]
    text, _ = algorithms.table({"rloo": seeds[:1]})
    assert "| RLOO | 1 | 0.001 | 2 | 0.500 | 0.500 | 0.000 | 0.250 | 0.250 | 50.0 [" in text
    assert "| RLOO | 2 | - | " in algorithms.table({"rloo": seeds})[0]


def test_every_row_names_a_config_that_ships(algorithms):
    for algorithm in algorithms.ALGORITHMS.values():
        compose("tiny_cpu", [algorithm.chosen] if algorithm.chosen else [])
