from agent_environments.tools import reward

INSTRUCTIONS = "Answer in one word."
TASKS = [
    {"id": f"n {n}/a", "question": f"Spell {n} as a word: " + ["zero", "one", "two", "three", "four"][n] + "?", "word": w}
    for n, w in enumerate(["zero", "one", "two", "three", "four"])
]


@reward(weight=3)
def right(answer, word):
    return word == answer


@reward(scale=(-1, 1))
def short(answer):
    """One for a word, minus one for none or for several."""
    return 1 if len(answer.split()) == 1 and answer.islower() else -1


@reward(weight=0)
def characters(answer):
    return len(answer)
