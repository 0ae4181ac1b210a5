from agent_environments.tools import reward


@reward
def even(answer: str) -> bool:
    return len(answer) % 2 == 0


TASKS = [{"id": str(n), "question": f"Say something of {n}."} for n in range(10)]
