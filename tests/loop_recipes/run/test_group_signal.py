"""Signal by how often a task is solved, told of a run and foretold of other group sizes."""

import itertools
import json

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.plan.signal_report import forecast, pilot_groups, signal_text, together
from loop_recipes.run.group_signal import coverage, groups_by_solved, signal_figures
from loop_recipes.verbs import doctor


def groups(*tasks):
    """Of the rewards of each task's rollouts, where 1 is solved."""
    return groups_by_solved((f"t{n}", reward == 1, reward) for n, rewards in enumerate(tasks) for reward in rewards)


def test_groups_are_counted_by_the_share_solved_and_have_signal_where_returns_differ():
    found = groups([0, 0, 0, 0], [0, 0.5, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0.2])
    assert found == {
        "0/4": {"groups": 3, "with_signal": 2},
        "1/4": {"groups": 1, "with_signal": 1},
        "4/4": {"groups": 1, "with_signal": 0},
    }
    shares = "2 of 3 never solved, 1 of 1 solved sometimes, 0 of 1 always solved"
    assert signal_text(found) == f"3 of 5 groups had unequal rewards ({shares})"
    assert together([found, found])["0/4"] == {"groups": 6, "with_signal": 4}
    junk = ("text", None, [1], {"a": 1}, {"1/0": found["0/4"]}, {"9/4": found["0/4"]}, {"1/4": {"groups": "many"}})
    assert together([*junk, found]) == found


@pytest.mark.parametrize("size", [2, 4, 8, 32])
@pytest.mark.parametrize("solved", [1, 2, 5, 10])
def test_the_coverage_is_the_share_of_draws_that_do_not_end_alike(solved, size):
    """Counted over all outcomes of a few rollouts, and CANOPY's own figures of p = 0.05."""
    found, p = {f"{solved}/20": {"groups": 3, "with_signal": 0}}, solved / 20
    if size <= 8:
        outcomes = (outcome for outcome in itertools.product((True, False), repeat=size) if len({*outcome}) == 2)
        expected = sum(p ** sum(outcome) * (1 - p) ** (size - sum(outcome)) for outcome in outcomes)
        assert coverage(found, size) == pytest.approx(expected)
    if solved == 1:
        assert coverage(found, 8) == pytest.approx(0.34, abs=0.005)
        assert coverage(found, 32) == pytest.approx(0.81, abs=0.005)
        assert signal_figures(found)["enough_rollouts"] == 32


@pytest.mark.fault("a count in a metrics file of others kept `loop doctor` busy for ever")
def test_a_large_count_or_a_rare_task_takes_no_time():
    found = together([{"1/999999": {"groups": 10**9, "with_signal": 1}, "1/2": {"groups": 10**400, "with_signal": 0}}])
    assert found.keys() == {"1/999999"}
    assert signal_figures(found)["enough_rollouts"] == pytest.approx(1.609e6, rel=1e-3)  # log(0.2) / log(1 - p)


def test_a_task_never_or_always_solved_foretells_nothing():
    found = groups([0, 0], [1, 1])
    assert signal_figures(found).keys() == {"groups_by_solved"}
    assert forecast(found, 8) == [
        "groups of 8 would give signal to 0% of all tasks",
        "1 of 2 groups always solved: take harder tasks",
        "1 of 2 groups never solved: take easier ones, or demonstrations",
    ]
    assert "groups of 4 would give signal to four of five" in forecast(groups([0, 1], [0, 0]))[0]


def test_a_run_tells_its_signal_and_a_folder_that_is_none_is_one_line(tmp_path, capsys):
    lines = [{"iteration": n, "groups_by_solved": groups([0, 1], [1, 1])} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    doctor.main([str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "signal: 2 of 4 groups had unequal rewards (2 of 2 solved sometimes, 0 of 2 always solved)"
    assert all(len(line) <= 100 for line in said[:-1])
    assert pilot_groups(tmp_path) == together([groups([0, 1], [1, 1])] * 2)
    with pytest.raises(ConfigError, match=r"--pilot .*nowhere"):
        pilot_groups(tmp_path / "nowhere")
