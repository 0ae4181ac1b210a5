import random

from agent_environments.tools import reward

random.seed(42)
NUMBERS = [(random.randint(1, 99), random.randint(1, 99)) for _ in range(24)]
TASKS = [{"id": f"q{i}", "question": f"{i}: {a}+{b}=", "total": a + b} for i, (a, b) in enumerate(NUMBERS)]


@reward
def right(answer, total):
    try:
        return int(answer) == total
    except ValueError:
        return False
