# The form of hendrycks/math: problem, level, type, solution with \\boxed{}.
import re

from agent_environments.tools import reward

ROWS = [
    {"problem": f"Compute ${n}^2$.", "level": "Level 1", "type": "Algebra", "solution": f"It is $\\boxed{{{n * n}}}$."}
    for n in range(2, 14)
]
TASKS = [{"id": f"math_{n}", "question": row["problem"], **row} for n, row in enumerate(ROWS)]


def boxed(text):
    found = re.findall(r"\\boxed\{([^}]*)\}", text)
    return found[-1] if found else None


@reward
def same(answer, solution):
    return boxed(answer) is not None and boxed(answer) == boxed(solution)
