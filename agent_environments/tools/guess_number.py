"""A game as a module of tools: find a number from 1 to 20 by "Higher." and "Lower.". `loop init` copies this file."""

from agent_environments.tools import reward, tool

GUESSES = 5
"""Halving what is left finds every number."""
INSTRUCTIONS = f"You find a number by guessing. You have {GUESSES} guesses. When it is found, say so without a call."


class Game:
    def reset(self, task):
        """Begin the game of a task; called before each episode."""
        self.number = task["number"]
        self.left = GUESSES
        self.found = False

    @tool
    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: from 1 to 20.
        """
        if self.found or self.left == 0:
            return "The game is over."
        self.left -= 1
        self.found = number == self.number
        return "Found." if self.found else "Higher." if number < self.number else "Lower."


@reward
def found(instance: Game) -> bool:
    """Judge an episode: a number from 0 to 1, or True or False."""
    return instance.found


TASKS = [
    {"id": f"number{number}", "question": "I think of a number from 1 to 20. Which is it?", "number": number}
    for number in range(1, 21)
]
