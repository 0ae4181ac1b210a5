"""The shares of tasks and of groups that are solved, against figures worked out by hand."""

import pytest

from loop_recipes.evaluation.success import group_success, run_success
from support.texts import texts_beside

TABLES = texts_beside(__file__)

SUCCESSES = TABLES["successes"]


def test_success_counts_tasks_and_group_success_whole_groups():
    result = run_success(SUCCESSES)
    assert result.success == pytest.approx(100 * 6 / 8)
    assert result.group_success == pytest.approx(100 * 1 / 3)
    assert (result.tasks, result.group_count) == (8, 3)
    assert group_success(SUCCESSES) == {"aaa": True, "bbb": False, "ccc": False}


def test_all_and_none():
    assert run_success(dict.fromkeys(SUCCESSES, True)).group_success == 100.0
    nothing = run_success(dict.fromkeys(SUCCESSES, False))
    assert (nothing.success, nothing.group_success) == (0.0, 0.0)


def test_no_tasks_has_no_score():
    with pytest.raises(ValueError, match="at least one task"):
        run_success({})
