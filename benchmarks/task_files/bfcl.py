# The form of the Berkeley function-calling leaderboard: id "simple_<n>", ground_truth [{name: {argument: [values]}}].
from agent_environments.tools import reward, tool

calls = []


@tool(terminal=True)
def calculate_area(base: float, height: float, unit: str = "units") -> dict:
    """Calculate the area of a triangle given its base and height.

    Args:
        base: The base of the triangle.
        height: The height of the triangle.
        unit: The unit of measure.
    """
    return {"calculate_area": {"base": base, "height": height, "unit": unit}}


TASKS = [
    {
        "id": f"simple_{n}",
        "question": f"Find the area of a triangle with a base of {n} units and height of 5 units.",
        "ground_truth": {"calculate_area": {"base": [n], "height": [5], "unit": ["units", ""]}},
    }
    for n in range(10, 30)
]


@reward
def matches(answer, ground_truth):
    import json

    if not answer:
        return 0
    (name, arguments), = json.loads(answer).items()
    wanted = ground_truth.get(name, {})
    return all(value in wanted.get(key, []) for key, value in arguments.items())
