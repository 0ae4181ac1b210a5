"""What experiments/turn_credit.py counts: the wrong turn of a flawed episode, who found it, and the interval."""

import json
import random
import sys
from types import SimpleNamespace

from appworld_adapter.dataset import load_split
from appworld_adapter.flaws import flawed_turns, possible_flaws
from loop_formats.places import loop_home
from support.experiment_scripts import load_experiment

WORLD = loop_home() / "worlds/synthetic"
turn_credit = load_experiment("turn_credit")
Case, interval, wrong_turn = turn_credit.Case, turn_credit.interval, turn_credit.wrong_turn


def test_the_wrong_turn_is_the_one_that_a_flaw_has_changed():
    seen = set()
    for task_id in load_split(WORLD, "dev"):
        folder = WORLD / "data/tasks" / task_id / "ground_truth"
        turns = json.loads((folder / "turns.json").read_text())
        demonstration = json.loads((folder / "demonstration.json").read_text())
        for flaw in possible_flaws(demonstration):
            flawed = flawed_turns(turns, demonstration, random.Random(task_id), flaw)
            wrong = wrong_turn([turn["code"] for turn in flawed], [turn["code"] for turn in turns])
            before = [turn["code"] for turn in flawed[:wrong]]
            assert all(code in [turn["code"] for turn in turns] for code in before)
            if flaw == "gave_up":
                assert wrong == len(flawed) - 1
            elif flaw in ("placeholder_password", "guessed_interface"):
                assert wrong == len(flawed) - 2, "the last one gives up"
            elif flaw == "wrong_value":
                assert flawed[wrong] != turns[wrong]
            seen.add(flaw)
    assert {"gave_up", "placeholder_password", "several_cells", "wrong_value"} <= seen


def test_the_interval_is_over_tasks():
    share, low, high = interval({f"task {n}": [float(n % 2)] * 3 for n in range(20)})
    assert share == 0.5
    assert 0.2 < low < 0.4 < 0.6 < high < 0.8
    assert interval({"one": [1.0], "other": [1.0, 1.0]}) == (1.0, 1.0, 1.0)


def test_every_critic_has_a_row_for_all_cases_and_for_each_flaw(tmp_path, monkeypatch, capsys):
    def rollout(task):
        return SimpleNamespace(task_id=task, turns=[1, 2, 3, 4])

    class Known:
        def __init__(self, args, seed):
            self.seed = seed

        def cases(self):
            return [Case(rollout("a_1"), "wrong_value", 2), Case(rollout("b_1"), "gave_up", 3)]

        def wrong_turns(self, cases):
            return {"sweet": [1.0, float(self.seed)], "chance": [0.25, 0.25]}

    monkeypatch.setattr(turn_credit, "Experiment", Known)
    words = ["turn_credit.py", "--output", str(tmp_path), "--seeds", "2", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert turn_credit.main() == 0
    rows = {(row["case"], row["metric"]): row["value"] for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows["ours sweet", "found"] == 0.75
    assert rows["ours sweet", "found_wrong_value"] == 1.0
    assert rows["ours sweet", "found_gave_up"] == 0.5
    assert (rows["ours chance", "found_low"], rows["ours chance", "found_high"]) == (0.25, 0.25)
    assert "2 held-out episodes of 4.0 turns" in capsys.readouterr().out
