"""benchmarks/rate_search.py: which learning rate is tried next, and which is chosen."""

import pytest

from support.benchmark_scripts import load_benchmark, made_up_record


@pytest.fixture(scope="module")
def rate_search():
    return load_benchmark("rate_search")


def run_at(rate, dev, reward=0.5):
    """A run of the search; ``dev`` is its success there at the end."""
    lines = [{"iteration": i, "reward": reward, "success": 0.5, "steps": 2} for i in range(1, 4)]
    lines[-1]["dev_success"] = dev
    return made_up_record("grpo", 1000, lines, rate=rate)


@pytest.mark.parametrize(
    ("dev", "tried", "chosen"),
    [
        ({}, [6e-4, 1.2e-3, 3e-4], 6e-4),
        ({2.4e-3: 0.6, 1.2e-3: 0.5}, [6e-4, 1.2e-3, 2.4e-3, 4.8e-3], 2.4e-3),
        ({1.5e-4: 0.3, 3e-4: 0.2}, [6e-4, 1.2e-3, 3e-4, 1.5e-4, 7.5e-5], 1.5e-4),
    ],
    ids=["none is better", "higher ones are", "lower ones are"],
)
def test_the_search_ends_when_both_neighbours_of_the_best_are_worse(rate_search, dev, tried, chosen):
    search = {}
    while (rate := rate_search.next_rate(search)) is not None:
        search[rate] = run_at(rate, dev.get(rate, 0.1))
    assert list(search) == tried
    assert rate_search.best_rate(search) == chosen


def test_equal_success_on_dev_is_decided_by_reward(rate_search):
    search = {rate: run_at(rate, 0.25, reward) for rate, reward in ((3e-4, 0.4), (6e-4, 0.5), (1.2e-3, 0.3))}
    assert rate_search.best_rate(search) == 6e-4
    assert "| GRPO | 0.250 / 0.400 | **0.250 / 0.500** | 0.250 / 0.300 |" in rate_search.search_table({"grpo": search})
    del search[1.2e-3]
    assert "**" not in rate_search.search_table({"grpo": search}), "nothing is chosen before the end"


def test_a_search_is_read_from_its_records(rate_search, tmp_path):
    assert rate_search.read_search(tmp_path, "grpo", 600) == {}
    search = {rate: run_at(rate, 0.25) for rate in (3e-4, 6e-4)}
    for rate, run in search.items():
        run.write(rate_search.records_at(tmp_path, rate))
    read = rate_search.read_search(tmp_path, "grpo", 600)
    assert [run.rate for run in read.values()] == list(read) == list(search)
    assert rate_search.read_search(tmp_path, "rloo", 600) == {}
