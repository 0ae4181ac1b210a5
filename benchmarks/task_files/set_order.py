from agent_environments.tools import reward

WORDS = {"pear", "apple", "plum", "quince", "cherry", "fig", "date", "lime"}
TASKS = [{"question": f"Spell {word} backwards.", "target": word[::-1]} for word in WORDS]


@reward
def right(answer, target):
    return answer == target
