"""A score is one figure wherever it is shown, whatever the runs lack: per task over its runs, then over tasks."""

from dataclasses import asdict
from statistics import fmean, stdev

import pytest

from loop_formats.collection_request import LostRollout
from loop_recipes.evaluation.comparison import compare
from loop_recipes.evaluation.dev_scores import dev_scores
from loop_recipes.evaluation.groups import score_groups
from loop_recipes.evaluation.scores import NamedResults, TaskResult, score, score_bounds
from support.counter_node import counter_request
from support.fake_node import FixedNode, collected
from support.small_runs import stored_rollout

pytestmark = pytest.mark.fault("a score where runs lack results")
PART = "a number over part of the data is shown as one over all"

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
    for key, (low, high) in asdict(score_bounds(made)).items():
        mean = found.reward if key == "reward" else getattr(found, key).mean
        assert low - 1e-9 <= mean <= high + 1e-9, f"{key}: no outcome of what is lost gives it"
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


@pytest.mark.fault(PART)
@pytest.mark.parametrize(
    ("runs", "share"),
    [
        (["+.+.", "+-+.", "++-."], fmean([1 / 2, 2 / 3])),  # one of two runs solved a0_2, and no run has a1_2
        (["+.", ".-"], 0),  # a0_2 was never solved
        (["++", "-."], 1 / 2),  # run 1 did not solve the group, whatever it lost
    ],
)
def test_a_lost_rollout_counts_in_its_group_with_the_other_runs_of_its_task(runs, share):
    assert score(results(runs), resamples=200).group_success.mean == pytest.approx(100 * share)


@pytest.mark.fault(PART)
@pytest.mark.parametrize(
    ("runs", "k", "any_of", "all_of", "fewer"),
    [
        ([*["++++++" + "-" * 14] * 4, "++" + "." * 18], 5, 30, 30, 18),
        (["+---------", *["-" * 10] * 2, "-" + "." * 9], 4, 10, 0, 9),
        (["+-", "+.", "-."], 3, 50, 0, 1),
    ],
)
def test_pass_at_k_is_over_all_tasks(runs, k, any_of, all_of, fewer):
    last = score(results(runs), resamples=200).passes[-1]
    figures = (last.k, last.any.estimate, last.all.estimate, last.tasks, last.tasks - last.whole)
    assert figures == pytest.approx((k, any_of, all_of, len(runs[0]), fewer))


def on_the_way(rollouts, lost, **request):
    return dev_scores(FixedNode(collected(rollouts, lost)), counter_request(**request))


@pytest.mark.fault(PART)
def test_scores_on_the_way_are_over_all_tasks_and_say_of_how_many():
    """Of ten tasks nine lost one rollout of four; the tenth is solved once. An eleventh has none."""
    rollouts = [
        stored_rollout("c", f"t_{task}", run, 0, float(task == run == 0), 300, seed=run)
        for task in range(10)
        for run in range(4 if task == 0 else 3)
    ]
    found = on_the_way(rollouts, [LostRollout("t_10", run, "server_error", "boom") for run in range(4)])
    assert found["dev_tasks"] == 10
    found = on_the_way(rollouts, [], rollouts_per_task=4)
    assert (found["dev_success"], found["dev_pass_at_k"], found["dev_pass_all_k"]) == pytest.approx((0.025, 0.1, 0))


def test_a_score_on_the_way_is_the_same_figure():
    """Of one task three rollouts are left, of the other one."""
    rollouts = [stored_rollout("c", "t_1", index, 0, 1.0, 300, seed=index) for index in range(3)]
    found = on_the_way([*rollouts, stored_rollout("c", "t_2", 0, 0, 0.5, 300, seed=9)], [])
    assert (found["dev_success"], found["dev_reward"]) == (0.5, 0.75)
