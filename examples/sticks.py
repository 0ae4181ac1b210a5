"""A second game in plain text: of some sticks two players take 1, 2 or 3 in turn, and whoever takes the last one wins.

    loop train examples/sticks.py --model models/SmolLM2-135M-Instruct

Whoever leaves a multiple of four wins. The agent can always do so in its first turn, and its opponent makes no mistake.
"""

import re

from agent_environments.tools import reply, reward

INSTRUCTIONS = "You play a game. Reply with 1, 2 or 3."
NAMES = ("sticks", "coins", "stones", "beans", "cards", "shells", "apples", "marbles")


class Game:
    def reset(self, task):
        self.name = task["name"]
        self.left = task["count"]
        self.habit = task["habit"]
        self.won = False

    @reply
    def take(self, text: str) -> str | None:
        """Answer a turn, whose first number is what the agent takes; one without 1, 2 or 3 takes 1, but cannot win."""
        said = re.search(r"\d+", text)
        number = int(said[0]) if said and said[0] in ("1", "2", "3") else None
        taken = min(number or 1, self.left)
        self.left -= taken
        if self.left == 0:
            self.won = number is not None
            return None
        answer = min(self.left % 4 or self.habit, self.left)
        self.left -= answer
        if self.left == 0:
            return None
        return f"You take {taken}. I take {answer}. {self.left} {self.name} are left."


@reward
def won(instance: Game) -> bool:
    return instance.won


TASKS = [
    {
        "id": f"{count}{name}{habit}",
        "question": f"There are {count} {name}. We take turns, and whoever takes the last one wins. How many do you "
        "take, 1, 2 or 3?",
        "name": name,
        "count": count,
        "habit": habit,
    }
    for name in NAMES
    for count in range(5, 20)
    if count % 4
    for habit in (1, 2, 3)
]
