"""`loop doctor`: each rule on a run that has the fault, on one that has not, and on one that has just begun."""

import json

import pytest

from loop_recipes.plots.curves import main as plot
from loop_recipes.verbs.doctor import RULES, findings, main
from support.texts import texts_beside

TABLES = texts_beside(__file__)

SOUND = TABLES["sound"]


def run(**changes):
    """Nine iterations; a value may be a list, of one for each."""
    lines = []
    for number in range(9):
        given = {"reward": 0.3 + 0.02 * number, "success": 0.1 + 0.02 * number} | SOUND | changes
        values = {key: value[number] if isinstance(value, list) else value for key, value in given.items()}
        lines.append({"iteration": number + 1, **values})
    return lines


FAULTS = {
    "no_signal": (
        {"groups_without_signal": 8, "reward": 0.0, "success": 0.0},
        "no signal in 40 of 40 groups of rollouts (mean reward 0.000)",
    ),
    "no_grade": (
        {"rollouts": 40, "ungradable_rollouts": 8, "broken_rollouts": 1},
        "of 200 rollouts 40 could not be graded, and in 5 the environment broke",
    ),
    "broken_gap": (
        {"gap_verdict": ["ok"] * 7 + ["broken"] * 2, "gap_p99": 0.5, "gap_base": 0.03},
        "is called broken in 2 of 5 iterations (99th percentile up to 0.5 nats, before the first step 0.03)",
    ),
    "cut_turns": ({"completed": 0.25}, "only 25% of the episodes are ended by the agent"),
    "failing_calls": (
        {"tool_calls_wrong_arguments": 0.6},
        "60% of the tool calls have wrong arguments (tool_calls_wrong_arguments)",
    ),
    "hollow_reward": ({"success": 0.1}, "the reward rose by 0.120 and the share of tasks solved by +0.000"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_figure_and_page(name, tmp_path, capsys):
    changes, seen = FAULTS[name]
    (found,) = findings(run(**changes))
    assert seen in str(found)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run(**changes)))
    assert main([str(tmp_path)]) == 1
    assert "(docs/troubleshooting.md#" in capsys.readouterr().out


def test_there_is_a_fault_for_each_rule():
    assert {rule.__name__ for rule in RULES} == set(FAULTS)


def test_a_sound_run_says_what_was_looked_for(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run()))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"nothing found in 9 iterations of {tmp_path}; looked for: no signal, ")


@pytest.mark.parametrize("lines", [[], run()[:1], [{"iteration": 1, "reward": None}]])
def test_a_run_that_has_just_begun_has_no_findings(lines):
    assert findings(lines) == []


@pytest.mark.parametrize("changes", TABLES["other_faults_of_the_same_kinds"])
def test_other_faults_of_the_same_kinds(changes):
    assert len(findings(run(**changes))) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": [0.3, 0.5, 0.2, 0.6, 0.3, 0.5, 0.4, 0.3, 0.6], "success": 0.1},
        {"success": [0.1 + 0.03 * number for number in range(9)]},
        {"gap_verdict": ["broken"] * 3 + ["ok"] * 6},
        {"groups": 0, "groups_without_signal": 0},
        {"tool_calls_failed": None},
    ],
)
def test_noise_and_what_is_over_are_no_faults(changes):
    assert findings(run(**changes)) == []


@pytest.mark.fault("a metrics file of others ended `loop doctor` or `loop plot` with a traceback")
@pytest.mark.parametrize("junk", ["text", 10**400, float("nan"), float("inf"), None, True, [1], {"a": 1}, -1e200])
def test_any_value_may_stand_in_a_file_of_others(tmp_path, junk):
    keys = {*SOUND, "reward", "success", "dev_success", "gap_base", "cut_in_thinking", "tool_calls_unknown"}
    for key in keys:
        findings(run(**{"gap_verdict": "broken", key: [junk] * 9}))
    lines = run(**dict.fromkeys(keys, [junk] * 9))
    findings(lines)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert plot([str(tmp_path), "--out", str(tmp_path / "plots")]) == 0


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"loop doctor: {tmp_path} is not a training run: it has no metrics.jsonl\n"
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no iteration of {tmp_path} has ended yet\n"
