import numpy as np

from agent_environments.tools import reward, tool

rng = np.random.default_rng(0)
DATA = rng.integers(0, 100, size=(16, 5))
TASKS = [{"id": i, "question": f"Row {i}: what is the mean of {row}?", "row": row, "mean": row.mean()} for i, row in enumerate(DATA)]


@tool
def mean(values: list[float]) -> float:
    """The mean of some values."""
    return np.mean(values)


@tool
def describe(values: list[float]) -> dict:
    """Minimum, maximum, and the sorted values."""
    values = np.array(values)
    return {"min": values.min(), "max": values.max(), "sorted": np.sort(values)}


@tool(terminal=True)
def submit(value: float) -> float:
    """Submit the answer."""
    return np.float64(value)


@reward
def close(answer, mean):
    return np.isclose(float(answer), mean) if answer else np.bool_(False)


@reward(weight=0)
def distance(answer, mean):
    return np.abs(float(answer) - mean) if answer else np.float32(-1)
