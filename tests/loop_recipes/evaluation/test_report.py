"""The report of a stored evaluation of AppWorld stays as it is, byte for byte."""

from types import SimpleNamespace

import pytest

from agent_environments.description import Description, description_of
from appworld_adapter.pool.forked import AppWorldPool
from loop_recipes.evaluation.report import (
    best_policy,
    read_report,
)
from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.verbs.compare import main as compare_evals
from support.stored_evaluation import SAMPLINGS, STORED, report_again


@pytest.mark.parametrize("file", ["results.jsonl", "report.json", "report.md"])
def test_files_of_an_appworld_report_are_those_of_before(tmp_path, file):
    report_again(tmp_path, description_of("appworld", AppWorldPool))
    assert (tmp_path / file).read_bytes() == (STORED / file).read_bytes()


def test_the_terminal_shows_an_appworld_report_as_before(tmp_path):
    assert report_again(tmp_path, description_of("appworld", AppWorldPool)) == (STORED / "terminal.txt").read_text()


def test_a_stored_evaluation_is_compared_as_before(tmp_path, capsys):
    assert compare_evals([str(STORED), "--resamples", "300", "--out", str(tmp_path)]) == 0
    assert f"beside each other:\n    loop view {STORED}\nwritten: " in capsys.readouterr().out
    for file in ("comparison.md", "comparison.json"):
        assert (tmp_path / file).read_bytes() == (STORED / file).read_bytes()


def test_ids_of_any_text_are_reported(tmp_path):
    names = {"27e1026_2": "[/red] [bold] | x", "82e2fac_3": "$a/b {c"}
    shown = report_again(tmp_path, Description(), names)
    assert all(f"{name}, run" in shown for name in names.values())
    assert len(read_report(tmp_path)[1]) == 4


@pytest.mark.parametrize("changes", [{"behavior": 3}, {"behavior": ["turns"]}, {"task_id": None, "run": None}])
def test_a_line_that_is_no_result_is_refused(changes):
    line = {"task_id": "a_1", "run": 0, "behavior": {"turns": 1}, "later": True}
    assert TaskResult.from_dict(line).behavior == {"turns": 1}
    without = {name: value for name, value in (line | changes).items() if value is not None}
    with pytest.raises(TypeError):
        TaskResult.from_dict(without)


def test_an_environment_may_count_what_was_not_ended(tmp_path):
    report_again(tmp_path / "strict", Description())
    report_again(tmp_path / "lenient", Description(unfinished_solves=True))
    said = "An episode that the agent did not end itself counts as a failure."
    assert [said in (tmp_path / kind / "report.md").read_text() for kind in ("strict", "lenient")] == [True, False]


def test_another_environment_has_its_own_words_and_figures(tmp_path):
    """Every task is its own group, so there is one score; and no figure that it does not name."""
    shown = report_again(tmp_path, Description(score="wins"))
    text = (tmp_path / "report.md").read_text()
    assert "wins in percent: mean over tasks ± standard deviation over whole runs" in text
    assert "bootstrap interval over tasks" in text
    assert "| wins |" in text
    assert "wins difference" in text
    assert "had they all failed or succeeded, the wins difference would lie in [" in text
    assert "wins in %" in shown
    for word in ("TGC", "SGC", "scenario", "appendix", "show_api_doc", "Behaviour"):
        assert word not in text + shown


def test_one_policy_is_the_best_of_one():
    """A run of fewer versions than are chosen among on dev has one, and it is scored on the test splits."""
    cell = SimpleNamespace(sampling=SAMPLINGS["T=0"], policy=SimpleNamespace(name="at-policy-v0000"))
    score = SimpleNamespace(success=SimpleNamespace(mean=10.0), group_success=SimpleNamespace(mean=0.0))
    assert best_policy([SimpleNamespace(cell=cell, score=score)]) == "at-policy-v0000"
    assert best_policy([]) is None
