"""How scripts are drawn: every task in turn, and a flaw where the task leaves room for it."""

import random
from collections import Counter

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.warm_start.demonstrator import draw

POSSIBLE = {"a_1": ["hasty", "vague"], "a_2": ["vague"], "a_3": []}


def test_without_habits_every_task_is_drawn_and_a_share_is_flawed():
    drawn = list(draw(POSSIBLE, 300, random.Random(0), flawed_share=0.5))
    assert Counter(task for task, _ in drawn) == {"a_1": 100, "a_2": 100, "a_3": 100}
    flawed = Counter(task for task, flaw in drawn if flaw is not None)
    assert set(flawed) == {"a_1", "a_2"}
    assert all(30 < count < 70 for count in flawed.values())


def test_with_habits_only_tasks_with_room_for_one_are_drawn():
    drawn = list(draw(POSSIBLE, 20, random.Random(0), habits=["hasty"]))
    assert drawn == [("a_1", "hasty")] * 20


def test_a_habit_that_is_named_twice_is_drawn_twice_as_often():
    flaws = Counter(
        flaw for _, flaw in draw({"a_1": ["hasty", "vague"]}, 900, random.Random(0), habits=["hasty", "hasty", "vague"])
    )
    assert 550 < flaws["hasty"] < 650
    assert flaws["hasty"] + flaws["vague"] == 900


def test_no_room_for_any_habit_is_refused():
    with pytest.raises(ConfigError, match="leaves room for hasty"):
        list(draw({"a_3": []}, 1, random.Random(0), habits=["hasty"]))
