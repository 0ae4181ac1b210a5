import functools
import operator

from agent_environments.tools import reward, tool


def convert(value: float, rate: float) -> float:
    """Convert an amount of money."""
    return round(value * rate, 2)


to_dollars = tool(name="to_dollars")(functools.partial(convert, rate=1.1))
to_pounds = tool(name="to_pounds")(functools.partial(convert, rate=0.9))


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@tool(terminal=True)
@logged
def pay(amount: float) -> float:
    """Pay an amount."""
    return amount


def equal(answer, expected, tolerance):
    return answer != "" and abs(float(answer) - expected) <= tolerance


right = reward(name="right")(functools.partial(equal, tolerance=0.01))

TASKS = [{"id": f"pay_{n}", "question": f"Pay {n} euros in dollars.", "expected": round(n * 1.1, 2)} for n in range(1, 30)]
