"""TGC and SGC against figures worked out by hand."""

import pytest

from loop_recipes.evaluation.goal_completion import goal_completion, group_success

SUCCESSES = {
    "aaa_1": True,
    "aaa_2": True,
    "aaa_3": True,
    "bbb_1": True,
    "bbb_2": False,
    "ccc_1": False,
    "ccc_2": True,
    "ccc_3": True,
}


def test_tgc_counts_tasks_and_sgc_whole_scenarios():
    result = goal_completion(SUCCESSES)
    assert result.tgc == pytest.approx(100 * 6 / 8)
    assert result.sgc == pytest.approx(100 * 1 / 3)
    assert (result.tasks, result.scenarios) == (8, 3)
    assert group_success(SUCCESSES) == {"aaa": True, "bbb": False, "ccc": False}


def test_all_and_none():
    assert goal_completion(dict.fromkeys(SUCCESSES, True)).sgc == 100.0
    nothing = goal_completion(dict.fromkeys(SUCCESSES, False))
    assert (nothing.tgc, nothing.sgc) == (0.0, 0.0)


def test_no_tasks_has_no_score():
    with pytest.raises(ValueError, match="at least one task"):
        goal_completion({})
