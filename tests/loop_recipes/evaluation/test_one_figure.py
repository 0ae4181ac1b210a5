"""A score is one figure wherever it is shown, whatever the runs lack: per task over its runs, then over tasks."""

from statistics import fmean, stdev

import pytest

from loop_formats.collection_request import CollectionEnd
from loop_recipes.evaluation.comparison import NamedResults, compare
from loop_recipes.evaluation.groups import score_groups
from loop_recipes.evaluation.scores import TaskResult, score
from loop_recipes.rollouts.source import Collected
from support.counter_node import counter_request
from support.small_runs import stored_rollout

pytestmark = pytest.mark.fault("a score where runs lack results")

INPUTS = {
    "a last run of which two solved rollouts of twenty are left": [*["++++++" + "-" * 14] * 4, "++" + "." * 18],
    "one run with one rollout": ["-" * 9 + "." + "-" * 10, "." * 19 + "+"],
    "a run that is lost altogether": ["+-+-", "...."],
    "a task that is lost altogether": ["+-+.", "--+."],
    "each run lacks another task": [".+-+", "+.-+", "+-.+", "+--."],
    "one rollout of many": ["++++", "++-."],
    "only one rollout is left": ["...+", "....", "...."],
    "nothing is lost": ["+-+-", "++--"],
    "one run": ["+-.-"],
    "what is left failed": ["+++-", "...-", "...-"],
}


def results(runs):
    """Of one run per string of + (solved), - (not) and . (lost); tasks are called "a1_1", "a1_2", "a2_1", ..."""
    attempts = []
    for run, marks in enumerate(runs):
        for number, mark in enumerate(marks):
            task = f"a{number // 2}_{number % 2 + 1}"
            if mark == ".":
                attempts.append(TaskResult(task, run, failure="server_error: boom"))
            else:
                solved = mark == "+"
                attempts.append(TaskResult(task, run, reward=(1 + solved) / 2, success=solved, end_reason="completed"))
    return attempts


def right(runs):
    """The share of tasks solved, worked out by itself."""
    columns = [[mark == "+" for mark in column if mark != "."] for column in zip(*runs, strict=True)]
    return fmean(fmean(column) for column in columns if column)


@pytest.mark.parametrize("runs", INPUTS.values(), ids=list(INPUTS))
def test_report_interval_group_and_comparison_have_the_same_score(runs):
    made = results(runs)
    found, expected = score(made, resamples=200), right(runs)
    assert found.success.mean == pytest.approx(100 * expected)
    assert found.success.interval.estimate == pytest.approx(100 * expected)
    assert found.success.interval.low <= found.success.mean <= found.success.interval.high
    assert found.group_success.interval.low <= found.group_success.mean <= found.group_success.interval.high
    assert found.reward == pytest.approx((1 + expected) / 2)
    tasks = sorted({each.task_id for each in made})
    [group] = score_groups(made, {"all tasks": tasks}, resamples=200)
    assert group.success.estimate == pytest.approx(found.success.mean)
    assert group.reward.estimate == pytest.approx(found.reward)
    by_difficulty = score(made, dict.fromkeys(tasks, 1), resamples=200).by_difficulty[1]
    assert (by_difficulty.success, by_difficulty.group_success) == pytest.approx(
        (found.success.mean, found.group_success.mean)
    )
    nothing = [TaskResult(each.task_id, each.run, end_reason="completed") for each in made]
    difference = compare(NamedResults("none", "T=0", nothing), NamedResults("p", "T=0", made), resamples=200)
    assert difference.success.interval.estimate == pytest.approx(found.success.mean)
    assert difference.group_success.interval.estimate == pytest.approx(found.group_success.mean)


@pytest.mark.parametrize("runs", INPUTS.values(), ids=list(INPUTS))
def test_the_spread_is_that_of_runs_that_are_whole(runs):
    whole = [100 * fmean(mark == "+" for mark in run) for run in runs if "." not in run]
    std = score(results(runs), resamples=200).success.std
    assert std == (pytest.approx(stdev(whole)) if len(whole) > 1 else None)


def test_a_group_counts_in_the_runs_that_have_all_of_its_tasks():
    """Run 0 lacks a0_2: whether it would have solved the group nobody knows. No run has a1_2."""
    found = score(results(["+.+.", "+-+.", "++-."]), resamples=200)
    assert found.group_success.mean == pytest.approx(100 * fmean([1 / 2, 2 / 3]))


def test_a_score_on_the_way_is_the_same_figure():
    """Of one task three rollouts are left, of the other one."""
    from loop_recipes.evaluation.dev_scores import dev_scores

    class Source:
        def start(self, request):
            pass

        def read(self, request):
            rollouts = [stored_rollout("c", "t_1", index, 0, 1.0, 300, seed=index) for index in range(3)]
            rollouts.append(stored_rollout("c", "t_2", 0, 0, 0.5, 300, seed=9))
            return Collected(rollouts, CollectionEnd("complete", 4, 0, 0, {}, 0.0), 0.0)

    found = dev_scores(Source(), counter_request())
    assert (found["dev_success"], found["dev_reward"]) == (0.5, 0.75)
