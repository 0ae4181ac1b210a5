import random
import re

from agent_environments.tools import reply, reward


class Guess:
    def reset(self, task):
        self.secret = task["secret"]
        self.tries = 0
        self.won = False

    @reply
    def hear(self, text):
        self.tries += 1
        number = re.search(r"\d+", text)
        if number is None:
            return "A number, please." if self.tries < 6 else None
        self.won = int(number[0]) == self.secret
        return None if self.won or self.tries == 6 else ("more" if int(number[0]) < self.secret else "less")


@reward
def quick(instance):
    return instance.won * (1 if instance.tries <= 3 else 0.5)


r = random.Random("secret")
TASKS = [{"id": f"easy_{n}", "question": f"Game {n}: guess 1 to 50.", "secret": r.randint(1, 50)} for n in range(10)]
TASKS += [{"id": f"hard_{n}", "question": f"Hard game {n}: guess 1 to 50.", "secret": r.randint(1, 50)} for n in range(10)]
