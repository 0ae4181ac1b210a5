"""pass@k and pass^k against all sets of k attempts, and what is shown of them."""

import itertools
from statistics import fmean

import pytest

from loop_recipes.evaluation.pass_at_k import all_of, any_of, passes
from loop_recipes.evaluation.scores import TaskResult, score


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_both_are_the_shares_of_the_sets_of_k_attempts(attempts):
    for solved, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        sets = list(itertools.combinations([number < solved for number in range(attempts)], k))
        assert any_of(k, solved, attempts) == pytest.approx(fmean(map(any, sets)))
        assert all_of(k, solved, attempts) == pytest.approx(fmean(map(all, sets)))


def test_a_task_with_fewer_attempts_counts_with_those_that_it_has():
    runs = [{"a": True, "b": False}, {"a": True, "b": True}, {"a": False}]  # the third attempt at b was lost
    one, two, three = passes(runs, str, resamples=50)
    assert [(each.k, each.tasks, each.whole) for each in (one, two, three)] == [(1, 2, 2), (2, 2, 2), (3, 2, 1)]
    assert one.any.estimate == pytest.approx(one.all.estimate)
    assert (one.any.estimate, two.any.estimate, two.all.estimate) == pytest.approx(
        (100 * (2 / 3 + 1 / 2) / 2, 100, 100 / 6)
    )
    assert (three.any.estimate, three.all.estimate) == (100.0, 0.0)
    assert two.any.low <= two.any.estimate <= two.any.high


@pytest.mark.parametrize(
    ("runs", "shown"), [(1, []), (2, [1, 2]), (8, list(range(1, 9))), (12, [1, 2, 4, 8, 12]), (16, [1, 2, 4, 8, 16])]
)
def test_which_k_are_shown(runs, shown):
    assert [one.k for one in passes([{"a": True}] * runs, str, resamples=10)] == shown


def test_pass_at_one_is_the_score():
    results = [
        TaskResult(task, run, success=(run + number) % 3 == 0, end_reason="completed")
        for number, task in enumerate(["a_1", "a_2", "b_1"])
        for run in range(4)
    ]
    found = score(results, resamples=50)
    assert found.passes[0].any == found.success.interval
    assert [one.k for one in found.passes] == [1, 2, 3, 4]
