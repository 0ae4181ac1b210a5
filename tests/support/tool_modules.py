"""Modules as users of `agent_environments.tools` write them, for tests."""

SUMS = '''
import asyncio
import time

from agent_environments.tools import reward, tool

INSTRUCTIONS = "You add numbers."


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


@tool(max_characters=20)
async def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    await asyncio.sleep(0)
    return text * times


@tool
def fail(how: str) -> None:
    """Fail."""
    if how == "exit":
        raise SystemExit(3)
    if how == "bytes":
        return b"\\xff"
    if how == "surrogate":
        return "\\ud800"
    raise KeyError(how)


@tool(deadline_s=0.05)
def dawdle(seconds: float) -> str:
    """Take your time."""
    time.sleep(seconds)
    return "late"


@tool(terminal=True)
def answer(value: int) -> int:
    """Give the answer."""
    return value


@reward
def right(answer: str, target: int, trajectory: list) -> float:
    return (answer == str(target)) * (0.5 if len(trajectory) > 6 else 1.0)


TASKS = {
    "train": [{"id": "sum_1", "question": "What is 17 + 25?", "target": 42}],
    "dev": [{"question": "What is 1 + 1?", "target": 2}],
}
'''

COUNTER = '''
import os
import pathlib
import re
import time

from agent_environments.tools import reply, reward, tool

FOLDER = pathlib.Path(__file__).parent


class Counter:
    def reset(self, task):
        if task["id"] == "broken_1":
            raise RuntimeError("cannot be reset")
        self.value, self.owner = 0, task["id"]
        return f"The counter of {task['id']} shows 0."

    def close(self):
        (FOLDER / f"closed-{os.getpid()}").touch()

    @tool
    def add(self, amount: int) -> str:
        """Add to the counter."""
        self.value += amount
        return f"{self.owner}: {self.value}"

    @tool(deadline_s=0.2)
    def hang(self) -> str:
        """Never come back."""
        while True:
            time.sleep(0.05)

    @tool(deadline_s=0.2)
    def power(self) -> int:
        """Work that cannot be interrupted."""
        return sum(range(10**12))

    @tool(deadline_s=3600)
    def search(self, pattern: str, text: str) -> bool:
        """Search a text."""
        return re.search(pattern, text) is not None

    @tool
    def leave(self) -> None:
        """End the process."""
        os._exit(3)

    @tool
    def process(self) -> int:
        """Name the process."""
        return os.getpid()

    @tool
    async def show(self) -> int:
        """Show the counter."""
        return self.value


@reward
def reached(instance: Counter, target: int) -> bool:
    return instance.value == target


TASKS = [{"id": f"count{n}_1", "target": n} for n in range(64)] + [{"id": "broken_1", "target": 0}]
'''


def call(name, /, **arguments):
    """An assistant's turn that makes one call."""
    from agent_environments.tool_calls import ToolCall, render_tool_call

    return render_tool_call(ToolCall(name, arguments))


def write(folder, source, name="mine"):
    """Path of a module with this text."""
    file = folder / f"{name}.py"
    file.write_text(source)
    return str(file)


PRODUCTS = '''
from agent_environments.tools import reward, tool


@tool(terminal=True)
def answer(value: float) -> float:
    """Give the final answer."""
    return value


@reward
def correct(answer: str, target: float) -> bool:
    return answer != "" and float(answer) == target


TASKS = [{"id": f"product{n}", "question": f"What is {n} times 37?", "target": 37.0 * n} for n in range(2, 22)]
'''
