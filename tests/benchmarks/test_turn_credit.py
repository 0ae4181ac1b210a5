"""What benchmarks/turn_credit.py counts: the wrong turn of a flawed episode, who found it, and the interval."""

import json
import random

from appworld_adapter.dataset import load_split
from appworld_adapter.flaws import flawed_turns, possible_flaws
from benchmarks.turn_credit import interval, wrong_turn
from loop_recipes.paths import loop_home

WORLD = loop_home() / "worlds/synthetic"


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
