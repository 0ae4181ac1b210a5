"""What a small agent thinks in a world, and the same conversation about other things."""

import random
import re

from agent_environments.protocol import Message
from loop_recipes.warm_start.demonstration import Demonstration
from loop_recipes.warm_start.world_words import WORDS

BABYAI, TEXTCRAFT = WORDS["babyai"], WORDS["textcraft"]
ROOM = """\
Instruction: go to a red ball

You see:
- grey ball left 2
- red ball ahead 1, left 2
- red ball ahead 3
Free cells ahead: 6, then a wall.
You carry: nothing."""
RECIPES = """\
Crafting commands:
craft 1 blue dye using 1 cornflower
craft 8 blue stained glass using 8 glass, 1 blue dye
craft 1 lily pad using 2 lily of the valley

Goal: craft blue stained glass."""
PLAN = (
    "get 8 glass",
    "get 1 cornflower",
    "craft 1 blue dye using 1 cornflower",
    "craft 8 blue stained glass using 8 glass, 1 blue dye",
)


def test_a_thought_in_babyai_says_what_decides():
    assert BABYAI.thought(ROOM, ROOM, ["move forward"]) == "The red ball ahead. Free cells ahead: 6."
    blocked = ROOM.replace("ahead: 6, then a wall", "ahead: 0, then a grey box")
    round_it = "The red ball ahead. Free cells ahead: 0. The red ball ahead 1, left 2."
    assert BABYAI.thought(ROOM, blocked, ["turn left"]) == round_it
    any_ball = ROOM.replace("a red ball", "the ball")
    assert BABYAI.thought(any_ball, any_ball, ["turn left"]) == "The ball left."
    unseen = "You see no objects.\nFree cells ahead: 5, then a wall."
    assert BABYAI.thought(ROOM, unseen, ["move forward"]) == "The red ball not seen. Free cells ahead: 5."


def test_colours_and_kinds_change_places_throughout():
    thought = "The red ball ahead. Free cells ahead: 6.\nAction: move forward"
    original = Demonstration("GoToLocal_1", None, 1.0, True, (Message("user", ROOM),), ((thought, "You did it."),))
    seen = set()
    for seed in range(20):
        other = BABYAI.renamed(original, random.Random(seed))
        name = other.opening[0].content.split("\n")[0].removeprefix("Instruction: go to a ")
        assert f"- {name} ahead 1, left 2\n- {name} ahead 3" in other.opening[0].content
        assert other.steps == ((thought.replace("red ball", name), "You did it."),)
        seen.add(name)
    assert len(seen) > 8


def test_a_thought_in_textcraft_says_what_is_missing_and_what_is_next():
    thoughts = [TEXTCRAFT.thought(RECIPES, "", PLAN[number:]) for number in range(len(PLAN))]
    assert thoughts == [
        "blue stained glass using 8 glass, 1 blue dye. Next glass get now.",
        "blue stained glass using 1 blue dye. Next blue dye using 1 cornflower. Next cornflower get now.",
        "blue stained glass using 1 blue dye. Next blue dye craft now.",
        "blue stained glass craft now.",
    ]


def test_words_of_items_become_others_throughout():
    opening = (Message("system", "You craft items."), Message("user", RECIPES))
    steps = (("craft 1 blue dye using 1 cornflower", "Crafted 1 minecraft:blue_dye"),)
    original = Demonstration("blue-stained-glass_1", None, 1.0, True, opening, steps)
    known, found = set(re.findall("[a-z]+", RECIPES)), set()
    for seed in range(20):
        other = TEXTCRAFT.renamed(original, random.Random(seed))
        system, task = (message.content for message in other.opening)
        assert system == "You craft items."
        recipe, _, _ = task.split("\n")[1:4]
        ((command, crafted),) = other.steps
        assert command == recipe
        blue, dye = re.fullmatch(r"craft 1 (\w+) (\w+) using 1 \w+", recipe).groups()
        assert crafted == f"Crafted 1 minecraft:{blue}_{dye}"
        assert task.endswith(f"Goal: craft {blue} {task.split()[-2]} {task.split()[-1]}")
        assert len({*re.findall("[a-z]+", task)}) == len(known), "words that differ go on to differ"
        found.add(blue)
    assert found & known
    assert found - known, "some words do not exist"
