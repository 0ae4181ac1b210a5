"""pass@k and pass^k against all sets of k attempts, and what is shown of them."""

import itertools
from statistics import fmean

import pytest

from loop_recipes.evaluation.pass_at_k import all_of, any_of, passes


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_both_are_the_shares_of_the_sets_of_k_attempts(attempts):
    for solved, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        sets = list(itertools.combinations([number < solved for number in range(attempts)], k))
        assert any_of(k, solved, attempts) == pytest.approx(fmean(map(any, sets)))
        assert all_of(k, solved, attempts) == pytest.approx(fmean(map(all, sets)))


@pytest.mark.parametrize(
    ("runs", "shown"), [(1, []), (2, [1, 2]), (8, list(range(1, 9))), (12, [1, 2, 4, 8, 12]), (16, [1, 2, 4, 8, 16])]
)
def test_which_k_are_shown(runs, shown):
    assert [one.k for one in passes([{"a": True}] * runs, str, resamples=10)] == shown
