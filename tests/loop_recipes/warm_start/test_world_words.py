"""What a small agent thinks in a world, and the same conversation about other things."""

import random

from agent_environments.protocol import Message
from loop_recipes.warm_start.demonstration import Demonstration
from loop_recipes.warm_start.world_words import WORDS

BABYAI = WORDS["babyai"]
ROOM = """\
Instruction: go to a red ball

You see:
- grey ball: 2 left
- red ball: 1 ahead, 2 left
- red ball: 3 ahead
The way ahead ends at a wall: 6 ahead.
You carry: nothing."""


def test_a_thought_in_babyai_quotes_where_the_nearest_object_is():
    assert BABYAI.thought(ROOM, ROOM, "move forward") == "The red ball: 1 ahead, 2 left."
    assert BABYAI.thought(ROOM, "You see:\n- grey ball: 1 right", "turn left") == "I see no red ball."
    any_ball = ROOM.replace("a red ball", "the ball")
    assert BABYAI.thought(any_ball, any_ball, "move forward") == "The ball: 2 left."


def test_colours_and_kinds_change_places_throughout():
    thought = "The red ball: 3 ahead.\nAction: move forward"
    original = Demonstration("GoToLocal_1", None, 1.0, True, (Message("user", ROOM),), ((thought, "You did it."),))
    seen = set()
    for seed in range(20):
        other = BABYAI.renamed(original, random.Random(seed))
        name = other.opening[0].content.split("\n")[0].removeprefix("Instruction: go to a ")
        assert f"- {name}: 1 ahead, 2 left\n- {name}: 3 ahead" in other.opening[0].content
        assert other.steps == ((f"The {name}: 3 ahead.\nAction: move forward", "You did it."),)
        seen.add(name)
    assert len(seen) > 8
