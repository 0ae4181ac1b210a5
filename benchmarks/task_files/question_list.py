from agent_environments.tools import reward

TASKS = [{"question": [{"role": "user", "content": f"{n}?"}], "target": str(n)} for n in range(5)]


@reward
def right(answer, target):
    return answer == target
