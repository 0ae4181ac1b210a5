from agent_environments.tools import reward, tool


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


@tool(terminal=True)
def answer(value: float) -> float:
    """Give the final answer."""
    return value


@reward
def correct(answer: str, target: float) -> bool:
    return answer != "" and float(answer) == target


TASKS = [{"id": f"product_{n}", "question": f"What is {n} times 37?", "target": 37.0 * n} for n in range(2, 60)]
