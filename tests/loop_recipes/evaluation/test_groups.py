"""Success and reward per environment and group, worked out by hand."""

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.evaluation.groups import compare_groups, score_groups, task_groups
from loop_recipes.evaluation.scores import NamedResults, TaskResult

TASKS = ["sums/a_1", "sums/b_1", "craft/depth1-x_1", "craft/depth4-y_1", "craft/depth4-z_1"]
GROUPS = task_groups(TASKS, {"deep": "craft/depth4-*"})


def results(*runs):
    """One run per list of (solved, reward), over TASKS."""
    return [
        TaskResult(task, run, reward=reward, success=solved, end_reason="completed", turns=2)
        for run, attempts in enumerate(runs)
        for task, (solved, reward) in zip(TASKS, attempts, strict=True)
    ]


WORST = [(False, 0.0)] * 5
SOME = [(True, 1.0), (False, 0.5), (True, 1.0), (False, 0.2), (False, 0.0)]
BEST = [(True, 1.0)] * 5


def test_groups_are_the_environments_and_what_the_config_names():
    groups = {
        "all tasks": TASKS,
        "sums": TASKS[:2],
        "craft": TASKS[2:],
        "deep": TASKS[3:],
    }
    assert groups == GROUPS
    assert task_groups(["aaa_1"], {}) == {}, "one environment and no groups: the score says it all"


@pytest.mark.parametrize(
    ("patterns", "complaint"),
    [
        ({"deep": "depth4-*"}, r"groups\.deep: no task matches 'depth4-\*'; ids are such as sums/a_1"),
        ({"sums": "sums/a_*"}, r"groups\.sums: there is a group of this name without it"),
    ],
)
def test_bad_groups_are_named(patterns, complaint):
    with pytest.raises(ConfigError, match=complaint):
        task_groups(TASKS, patterns)


def test_scores_of_groups():
    scores = {score.group: score for score in score_groups(results(SOME, BEST), GROUPS, resamples=200)}
    assert [scores[name].tasks for name in GROUPS] == [5, 2, 3, 2]
    assert scores["all tasks"].success.estimate == pytest.approx(70.0)
    assert scores["sums"].success.estimate == pytest.approx(75.0)
    assert scores["deep"].success.estimate == pytest.approx(50.0)
    assert scores["deep"].reward.estimate == pytest.approx((0.6 + 0.5) / 2)
    assert scores["sums"].reward.low <= 0.875 <= scores["sums"].reward.high


def test_differences_of_groups():
    sides = [NamedResults(name, "T=0", results(rows)) for name, rows in (("a", WORST), ("b", SOME))]
    differences = {item.group: item for item in compare_groups(*sides, GROUPS, resamples=200)}
    assert differences["sums"].success.interval.estimate == pytest.approx(50.0)
    assert differences["sums"].reward.interval.estimate == pytest.approx(0.75)
    assert differences["deep"].success.interval.estimate == 0.0
    assert differences["deep"].success.p_value == 1.0
    assert differences["deep"].reward.interval.estimate == pytest.approx(0.1)
