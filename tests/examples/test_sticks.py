"""The second game: who plays well wins each task, and who says nothing of use wins none."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples/sticks.py"
SPEC = importlib.util.spec_from_file_location("sticks", FILE)
sticks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sticks)


def play(task: dict, choose) -> bool:
    """Whether an agent wins that says `choose(left)` in each turn."""
    game = sticks.Game()
    game.reset(task)
    turns = 1
    while game.take(choose(game.left)) is not None:
        turns += 1
    assert turns <= 5
    return game.won


@pytest.mark.parametrize(
    ("choose", "wins"),
    [
        (lambda left: f"I take {left % 4}.", "all"),
        (lambda left: "", "none"),
        (lambda left: "All of them: 19", "none"),
        (lambda left: "1", "some"),
    ],
)
def test_a_game(choose, wins):
    won = sum(play(task, choose) for task in sticks.TASKS)
    assert {"all": won == len(sticks.TASKS), "none": won == 0, "some": 0 < won < len(sticks.TASKS) // 2}[wins]
