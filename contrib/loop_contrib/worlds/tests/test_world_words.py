"""What a small agent thinks in a world, and the same conversation about other things."""

import random

from agent_environments.protocol import Message
from loop_contrib.worlds.world_words import WORDS
from loop_recipes.warm_start.demonstration import Demonstration
from support.texts import texts_beside

TABLES = texts_beside(__file__)

BABYAI, TEXTWORLDEXPRESS = WORDS["babyai"], WORDS["textworldexpress"]
ROOM = TABLES["room"]


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


def test_what_can_be_done_is_named_otherwise_throughout():
    rules = "Read and follow the instructions book.\n\n"
    opening = (
        Message("system", "Commands are words such as: take <object>."),
        Message("user", f"{rules}Possible commands: take instructions book, take grape, take papaya"),
    )
    steps = (("Action: take papaya", "You take the papaya.\n\nPossible commands: put papaya in box, take grape"),)
    original = Demonstration("peckingorder_0", None, 1.0, True, opening, steps)
    seen = set()
    for seed in range(20):
        other = TEXTWORLDEXPRESS.renamed(original, random.Random(seed))
        ((command, shown),) = other.steps
        taken = command.removeprefix("Action: take ")
        assert shown.startswith(f"You take the {taken}.\n\nPossible commands: ")
        assert other.opening[0] == opening[0]
        assert other.opening[1].content.startswith(f"{rules}Possible commands: take instructions book, take ")
        assert other.opening[1].content.endswith(f", take {taken}")
        seen.add(taken)
    assert len(seen) > 10
