"""A game in plain text: find a number by "Higher." and "Lower.". `loop init` copies this file."""

import re

from agent_environments.tools import reply, reward

GUESSES = 5
"""Halving the range finds every number in so many guesses."""


class Game:
    def reset(self, task):
        """Begin the game of a task; called before each episode. A text that it returns follows the question."""
        self.number = task["number"]
        self.left = GUESSES
        self.found = False

    @reply
    def guess(self, text: str) -> str | None:
        """Answer a turn of the agent, whose first number is its guess; None ends the episode."""
        self.left -= 1
        match = re.search(r"\d{1,4}", text)
        number = int(match[0]) if match else None
        self.found = number == self.number
        if self.found or self.left == 0:
            return None
        if number is None:
            return "Say a number."
        return "Higher." if number < self.number else "Lower."

    # An action that the agent calls by name, with checked arguments, is a tool:
    #
    # @tool
    # def guess(self, number: int) -> str:
    #     """Guess the number."""


@reward
def found(instance: Game) -> bool:
    """Judge an episode: a number from 0 to 1, or True or False."""
    return instance.found


def solve(task):
    """Give the right turns of a task: `loop try` and `loop train` check that they earn 1."""
    return [str(task["number"])]


TASKS = [
    {
        "id": f"from{low}number{number}",
        "question": f"Guess a number between {low} and {low + 19}. Reply with the number only.",
        "number": number,
    }
    for low in range(1, 11)
    for number in range(low, low + 20)
]
