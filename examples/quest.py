"""A second game in plain text: a chest is to be opened, and its key lies in another room.

    loop train examples/quest.py --model models/SmolLM2-135M-Instruct

The key's room and then the chest's are two turns; there are five. A third room is named too, and the order changes.
"""

import random
import re

from agent_environments.tools import reply, reward

TURNS = 5
ROOMS = re.findall(r"\w+", "kitchen garden cellar attic library hall barn tower stable workshop chapel bedroom")
ASK = "Which room do you go to?"


class House:
    def reset(self, task):
        self.things = {room: thing for thing, room in task["rooms"].items()}
        self.turns = 0
        self.key = False
        self.opened = False

    @reply
    def go(self, text: str) -> str | None:
        """Answer a turn: the agent goes to the first room that its reply names, and stays without one."""
        room = re.search("|".join(ROOMS), text.lower())
        thing = self.things.get(room[0], "nothing") if room else ""
        self.turns += 1
        self.opened = thing == "chest" and self.key
        self.key = self.key or thing == "key"
        if self.opened or self.turns == TURNS:
            return None
        if not room:
            return f"You stay. {ASK}"
        news = {"chest": "The chest is locked.", "key": "You take the key.", "cat": "The cat is here."}
        return f"You are in the {room[0]}. {news.get(thing, 'Nothing is here.')} {ASK}"


@reward
def half_for_the_key(instance: House) -> float:
    return (instance.key + instance.opened) / 2


def task(seed: int) -> dict:
    draw = random.Random(seed)
    rooms = dict(zip(("chest", "key", "cat"), draw.sample(ROOMS, 3), strict=True))
    facts = [f"The {thing} is in the {room}." for thing, room in rooms.items()]
    draw.shuffle(facts)
    return {"id": str(seed), "question": f"Open the chest. {' '.join(facts)} {ASK}", "rooms": rooms}


def solve(task):
    return [task["rooms"]["key"], task["rooms"]["chest"]]


TASKS = [task(seed) for seed in range(200)]
