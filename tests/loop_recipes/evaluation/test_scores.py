"""Scores of runs worked out by hand, reports and comparisons."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agent_environments.description import DEFAULT_DESCRIPTION
from loop_recipes.evaluation.comparison import compare, compare_with_first
from loop_recipes.evaluation.report import lost_rollouts
from loop_recipes.evaluation.scores import NamedResults, TaskResult, score
from loop_recipes.verbs.compare import main as compare_evals
from support.texts import texts_beside

TABLES = texts_beside(__file__)

TASKS = ["aaa_1", "aaa_2", "bbb_1", "bbb_2"]


def attempt(task, run, solved=True, **changes):
    return TaskResult(
        **{
            "task_id": task,
            "run": run,
            "rollout_id": f"{task}/{run}",
            "reward": 1.0 if solved else 0.5,
            "success": solved,
            "end_reason": "completed",
            "turns": 4,
            **changes,
        }
    )


def runs(*solved):
    """Results of one run per string of + and -, over TASKS."""
    return [
        attempt(task, run, mark == "+")
        for run, marks in enumerate(solved)
        for task, mark in zip(TASKS, marks, strict=True)
    ]


def test_mean_and_spread_over_runs():
    result = score(runs("++++", "++-+"), resamples=200)
    assert (result.runs, result.tasks, result.group_count, result.bounds) == (2, 4, 2, None)
    assert [run.success for run in result.per_run] == [100.0, 75.0]
    assert [run.group_success for run in result.per_run] == [100.0, 50.0]
    assert result.success.mean == 87.5
    assert result.success.std == pytest.approx(25 / 2**0.5)
    assert result.success.interval.low < 87.5 <= result.success.interval.high <= 100.0
    assert result.success.interval.clusters == 2
    assert result.reward == pytest.approx((7 + 0.5) / 8)
    assert result.interactions == 4.0


def test_over_budget_is_a_failure_though_all_tests_pass():
    results = [*runs("++++")[:-1], attempt("bbb_2", 0, True, end_reason="turn_limit")]
    result = score(results, resamples=200)
    assert (result.success.mean, result.group_success.mean) == (75.0, 50.0)
    assert result.over_budget == [("bbb_2", 0)]


def lost(task, run, why="server_error: boom"):
    return TaskResult(task, run, failure=why)


def test_a_lost_rollout_is_neither_a_failure_nor_a_success():
    """Of two runs over four tasks one rollout is lost: 6 of 7 are solved; 6 or 7 of 8 would be.

    Three tasks have both of their rollouts, and one of those failed once."""
    result = score([*runs("++++", "++-+")[:-1], lost("bbb_2", 1)], resamples=200)
    assert (result.runs, result.tasks, result.group_count) == (2, 4, 2)
    assert [run.success for run in result.per_run] == pytest.approx([100.0, 200 / 3])
    assert result.lost == [("bbb_2", 1, "server_error: boom")]
    assert result.over_budget == []
    assert result.interactions == 4.0
    assert result.reward == pytest.approx((3 + 0.75) / 4)
    assert (result.success.mean, result.success.std) == (87.5, None)
    assert result.bounds.success == pytest.approx((75.0, 87.5))
    assert result.bounds.group_success == pytest.approx((75.0, 75.0)), "the scenario's other task failed in that run"
    assert result.bounds.reward == pytest.approx((6.5 / 8, 7.5 / 8))


def named(results):
    return NamedResults("a", "T=0", results)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: score([lost(task, 0) for task in TASKS]), "nothing to score: every rollout was lost"),
        (lambda: score([*runs("++++"), attempt("aaa_1", 1)]), "exactly one result"),
        (lambda: score([]), "exactly one result"),
        (lambda: compare(named(runs("++++")), named(runs("++++")[:-1])), "such as bbb_2"),
    ],
)
def test_what_holds_no_score_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_tasks_may_be_called_anything():
    """One that is no <scenario>_<n> is a scenario of its own."""
    names = ["gsm8k-17", "10_1", "10_2", "a/b.c_d", "x_1_", "²_²"]
    result = score([attempt(name, 0, name != "10_2") for name in names], resamples=200)
    assert (result.group_count, result.success.mean, result.group_success.mean) == (5, pytest.approx(500 / 6), 80.0)


def test_by_difficulty_averages_over_runs():
    difficulties = {"aaa_1": 1, "aaa_2": 1, "bbb_1": 3, "bbb_2": 3}
    result = score(runs("++++", "+-+-"), difficulties, resamples=200)
    assert (result.by_difficulty[1].success, result.by_difficulty[1].group_success) == (75.0, 50.0)
    assert (result.by_difficulty[3].success, result.by_difficulty[3].group_success, result.by_difficulty[3].tasks) == (
        75.0,
        50.0,
        2,
    )


def test_tasks_without_a_difficulty_are_in_no_figure_by_difficulty():
    result = score(runs("++-+"), {"aaa_1": 2, "bbb_1": 5, "other": 3}, resamples=200)
    assert {level: (each.success, each.tasks) for level, each in result.by_difficulty.items()} == {
        2: (100, 1),
        5: (0, 1),
    }


def test_results_survive_json():
    result = attempt("aaa_1", 2, False, failed_requirements=["assert answers match."])
    assert TaskResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_comparison_is_paired_by_task():
    result = compare(
        NamedResults("before", "T=0", runs("+---", "+---")), NamedResults("after", "T=0", runs("-++-", "-+++"))
    )
    assert result.success.interval.estimate == pytest.approx(100 * (5 / 8 - 2 / 8))
    assert result.group_success.interval.estimate == pytest.approx(25.0)
    assert result.gained == [("aaa_2", 0.0, 1.0), ("bbb_1", 0.0, 1.0), ("bbb_2", 0.0, 0.5)]
    assert result.lost == [("aaa_1", 1.0, 0.0)]
    # Scenario sums 0 and 1.5: both sign patterns of the second reach 1.5.
    assert result.success.p_value == 1.0


def test_lost_rollouts_are_left_out_of_a_comparison_and_bound_it():
    """The first lost a task altogether, the second one of its two runs: three tasks are left."""
    first = [lost(item.task_id, item.run) if item.task_id == "bbb_2" else item for item in runs("+-+-", "+-+-")]
    second = runs("++++", "++++")
    second[0] = lost("aaa_1", 0)
    result = compare(NamedResults("a", "T=0", first), NamedResults("b", "T=0", second), resamples=200)
    assert (result.tasks, result.lost_rollouts) == (3, (2, 1))
    assert result.success.interval.estimate == pytest.approx(100 / 3)
    assert result.success_bounds == pytest.approx((87.5 - 75.0, 100.0 - 50.0))
    whole = [NamedResults(name, "T=0", runs("++++")) for name in "ab"]
    assert compare(*whole).success_bounds is None
    nothing = [attempt("aaa_1", 0), *(lost(task, 0) for task in TASKS[1:])]
    other = [lost("aaa_1", 0), *(attempt(task, 0) for task in TASKS[1:])]
    with pytest.raises(ValueError, match="have no task in common that was not lost"):
        compare(NamedResults("a", "T=0", nothing), NamedResults("b", "T=0", other))


def test_every_sampling_has_its_own_baseline():
    scores = [NamedResults(name, sampling, runs("++--")) for sampling in ("T=0", "T=1") for name in ("a", "b", "c")]
    pairs = [(item.first, item.second, item.sampling) for item in compare_with_first(scores, resamples=200)]
    assert pairs == [("a", "b", "T=0"), ("a", "c", "T=0"), ("a", "b", "T=1"), ("a", "c", "T=1")]


def write_evaluation(folder, results, dataset="synthetic", **more):
    folder.mkdir(parents=True)
    limits = {"max_turns": 50}
    report = {"schema": 2, "dataset": dataset, "split": "dev", "tasks": TASKS, "limits": limits, **more}
    (folder / "report.json").write_text(json.dumps(report))
    lines = [json.dumps({"policy": "p", "sampling": "T=0", **result.to_dict()}) for result in results]
    (folder / "results.jsonl").write_text("\n".join(lines))
    return str(folder)


def compared(tmp_path, first, second, names=("first", "second"), **more):
    """The page of a comparison of two evaluations with these results."""
    folders = [write_evaluation(tmp_path / name, of, **more) for name, of in zip(names, (first, second), strict=True)]
    assert compare_evals([*folders, "--out", str(tmp_path / "out")]) == 0
    return (tmp_path / "out/comparison.md").read_text()


def test_compare_evals_names_evaluations_of_runs_by_their_runs(tmp_path):
    folders = ("demo/evaluation", "seed1/evaluation")
    assert "seed1/p against demo/p" in compared(tmp_path, runs("+---"), runs("-+++"), folders)


def test_compare_evals_refuses_evaluations_with_other_turns_in_an_environment(tmp_path, capsys):
    first = write_evaluation(tmp_path / "first", runs("+---"), environment_turns={"craft": 20})
    second = write_evaluation(tmp_path / "second", runs("-+++"), environment_turns={})
    assert compare_evals([first, second]) == 1
    assert (
        'differ in environment_turns, so their scores cannot be compared: {"craft": 20}, {}' in capsys.readouterr().err
    )


PART = "a number over part of the data is shown as one over all"


def pooled(tmp_path, *solved):
    """The comparison of A with B, of two seeds each, with these results."""
    folders = [
        write_evaluation(tmp_path / name, [replace(each, rollout_id=name) for each in runs(*marks.split())])
        for name, marks in zip("xyzw", solved, strict=True)
    ]
    words = ["A=" + ",".join(folders[:2]), "B=" + ",".join(folders[2:]), "--out", str(tmp_path)]
    assert compare_evals(words) == 0
    [found] = json.loads((tmp_path / "comparison.json").read_text())["comparisons"]
    return found


@pytest.mark.fault(PART)
def test_compare_evals_pools_seeds_with_an_interval_that_knows_of_them(tmp_path):
    """B is better by 50 points; where its seeds differ, less is known of that."""
    alike, apart = (
        pooled(tmp_path / name, "---- ----", "---- ----", *seeds)
        for name, seeds in {"alike": ["+-+- -+-+"] * 2, "apart": ["++++ ++++", "---- ----"]}.items()
    )
    widths = []
    for found in (alike, apart):
        assert (found["first"], found["second"]) == ("A (2 seeds)", "B (2 seeds)")
        assert found["success"]["interval"]["estimate"] == pytest.approx(50)
        widths.append(found["success"]["interval"]["high"] - found["success"]["interval"]["low"])
    assert widths[1] > 1.5 * widths[0]
    assert apart["success"]["p_value"] >= alike["success"]["p_value"]


@pytest.mark.fault(PART)
@pytest.mark.parametrize(
    ("words", "refusal"), TABLES["compare_evals_takes_no_evaluation_for_two_and_no_runs_for_others"]
)
def test_compare_evals_takes_no_evaluation_for_two_and_no_runs_for_others(tmp_path, capsys, words, refusal):
    made = {"x": ["+---"], "copy": ["+---"], "y": ["-+--"], "z": ["--+-"], "long": ["++--", "+---"]}
    folders = {name: write_evaluation(tmp_path / name, runs(*marks)) for name, marks in made.items()}
    assert compare_evals(words.format(**folders).split()) == 1
    assert refusal.format(**folders) in capsys.readouterr().err


@pytest.mark.fault(PART)
def test_what_was_lost_says_of_how_many_tasks_the_figures_are():
    results = [*runs("+--+")[:-1], lost("bbb_2", 0)]
    scored = SimpleNamespace(cell=SimpleNamespace(label="p"), results=results, score=score(results, resamples=200))
    line = lost_rollouts([scored], DEFAULT_DESCRIPTION)[0]
    assert line.startswith("p: 1 of 4 rollouts lost, and with them all of 1 of 4 tasks; had they all failed")


@pytest.mark.parametrize("damaged", ["cut", "{}", "[1]"])
def test_compare_evals_names_a_damaged_line(tmp_path, capsys, damaged):
    first = write_evaluation(tmp_path / "first", runs("+---"))
    file = tmp_path / "first/results.jsonl"
    line = file.read_text().splitlines()[0]
    file.write_text(f"{line}\n{line[:-9] if damaged == 'cut' else damaged}")
    assert compare_evals([first]) == 1
    assert capsys.readouterr().err.startswith(f"loop compare: {file}:2 is not a result; evaluate again")


def test_compare_evals_refuses_a_report_that_is_none(tmp_path, capsys):
    first = write_evaluation(tmp_path / "first", runs("+---"))
    (tmp_path / "first/report.json").write_text("[]")
    assert compare_evals([first]) == 1
    assert "report schema None is not" in capsys.readouterr().err


def test_compare_evals_takes_the_level_of_its_intervals(tmp_path, capsys):
    first = write_evaluation(tmp_path / "first", runs("+---"))
    second = write_evaluation(tmp_path / "second", runs("-+++"))
    assert compare_evals([first, second, "--level", "0.8", "--resamples", "200"]) == 0
    assert "80% bootstrap" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare_evals([first, second, "--level", "2"])
    assert "--level is 2; it must be 0.5 to below 1" in capsys.readouterr().err


def test_compare_evals_refuses_what_cannot_be_compared(tmp_path, capsys):
    first = write_evaluation(tmp_path / "first", runs("+---"))
    other = write_evaluation(tmp_path / "other", runs("+---"), dataset="appworld")
    assert compare_evals([first, other]) == 1
    assert "differ in dataset" in capsys.readouterr().err
    assert compare_evals([first]) == 1
    assert "nothing to compare" in capsys.readouterr().err
    assert compare_evals([first, str(tmp_path / "none")]) == 1
    assert "none holds no evaluation with a report.json: nothing is there" in capsys.readouterr().err
    assert compare_evals([first, str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f"report.json: did you mean {first}?\n")
    assert compare_evals([first, f"{first}/report.md"]) == 1
    assert capsys.readouterr().err.endswith(f"report.json: did you mean {first}?\n")
    (tmp_path / "begun/node").mkdir(parents=True)
    assert compare_evals([first, str(tmp_path / "begun")]) == 1
    assert (
        "begun holds no evaluation with a report.json: it has not ended, and the same `loop" in capsys.readouterr().err
    )
    (tmp_path / "begun/node").rename(tmp_path / "begun/other")
    assert compare_evals([first, str(tmp_path / "begun")]) == 1
    assert "report.json: give the folder of an evaluation" in capsys.readouterr().err
    (tmp_path / "begun/metrics.jsonl").touch()
    assert compare_evals([first, str(tmp_path / "begun")]) == 1
    assert "it is a training run, which `loop eval` has not scored" in capsys.readouterr().err
