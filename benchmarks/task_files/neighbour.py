from words import TASKS as ROWS
from words import normal

from agent_environments.tools import reward

TASKS = [dict(row) for row in ROWS]


@reward
def right(answer, target):
    from word_rules import strict

    return normal(answer) == normal(target) if strict else 0.0
