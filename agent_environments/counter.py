"""A complete environment in one small file: bring a counter to a number.

It needs nothing but the standard library, starts in microseconds and is deterministic, so the rollout node's fast tests
run on it, and `docs/your_own_task.md` explains environments with it.

The agent writes calls in a fenced python block: ``add(n)`` with 1 <= n <= 9, ``show()`` and ``finish()``. The calls are
read with :mod:`ast`, never executed.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence

from agent_environments.description import Description
from agent_environments.extraction import extract_code
from agent_environments.observation import FAILURE_HEAD, observation, reminder_end
from agent_environments.protocol import (
    Grade,
    Message,
    PoolStatus,
    Requirement,
    StepResult,
    TokenSpans,
    UnknownTask,
    tasks_of_split,
)
from agent_environments.slots import Slots

LARGEST_STEP = 9

TARGETS: dict[str, dict[str, int]] = {
    "train": {f"reach{n}_{k}": n + 2 * (k - 1) for n in (3, 5, 8, 12) for k in (1, 2, 3)},
    "dev": {f"reach{n}_{k}": n + 2 * (k - 1) for n in (4, 10) for k in (1, 2, 3)},
    "test_normal": {f"reach{n}_{k}": n + 2 * (k - 1) for n in (6, 9) for k in (1, 2, 3)},
    "test_challenge": {f"reach{n}_{k}": n + 5 * (k - 1) for n in (30, 50) for k in (1, 2, 3)},
}
"""Split -> task id -> the number to reach."""


class CounterEnvironment:
    """An episode with one counter."""

    def __init__(self, pool: CounterPool) -> None:
        self._pool = pool
        self._closed = False
        self._target = 0
        self._reminder = ""
        self._value = 0
        self._finished = False
        self._overstepped = False

    async def start(self, task_id: str) -> list[Message]:
        self._pool.check_tasks([task_id])
        self._target = next(targets[task_id] for targets in TARGETS.values() if task_id in targets)
        self._reminder = f"Task: Bring the counter from 0 to {self._target}."
        system = (
            "You work with a counter. Write calls in a ```python block: add(n) with n from 1 to 9, show(), finish()."
        )
        return [Message("system", system), Message("user", self._reminder)]

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self._pool.step_seconds)
        code = extract_code(action)
        output, failed = self._run(code)
        reminder = None if self._finished else self._reminder
        text = observation(output, reminder, self._pool.observation_max_tokens, self._pool.token_spans)
        return StepResult(
            text, done=self._finished, failed=failed, empty_action=not code, reminder=reminder_end(reminder)
        )

    def _run(self, code: str) -> tuple[str, bool]:
        """Run a program and return its output and whether a call failed; the first call that fails ends the program."""
        if not code:
            return "No code available to execute.", False
        lines: list[str] = []
        try:
            for name, arguments in _calls(code):
                match name, arguments:
                    case "add", [amount] if 1 <= amount <= LARGEST_STEP:
                        self._value += amount
                    case "add", [_]:
                        self._overstepped = True
                        raise ValueError(f"add takes a number from 1 to {LARGEST_STEP}")
                    case "show", []:
                        lines.append(str(self._value))
                    case "finish", []:
                        self._finished = True
                        break
                    case _:
                        raise ValueError(f"there is no call {name} with {len(arguments)} arguments")
        except Exception as error:  # parsing raises RecursionError, MemoryError, TypeError and others
            return f"{FAILURE_HEAD} Traceback:\n{type(error).__name__}: {error}", True
        return "\n".join(lines) or "Execution successful.", False

    async def grade(self) -> Grade:
        requirements = (
            Requirement(f"the counter shows {self._target}", self._value == self._target),
            Requirement("the counter is past half of the number", 2 * self._value > self._target),
            Requirement("the agent finished", self._finished),
            Requirement("no step was larger than allowed", not self._overstepped, no_op_pass=True),
        )
        passed = sum(requirement.passed for requirement in requirements)
        return Grade(passed / len(requirements), passed == len(requirements), requirements)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.release()


def _calls(code: str) -> list[tuple[str, list[int]]]:
    """Return the calls of a program that only calls names with integers; raises ValueError for other programs."""
    calls: list[tuple[str, list[int]]] = []
    for statement in ast.parse(code).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords):
            raise ValueError(f"line {statement.lineno} is not a call")
        arguments = [ast.literal_eval(argument) for argument in call.args]
        if not all(type(argument) is int for argument in arguments):
            raise ValueError(f"line {statement.lineno}: arguments must be whole numbers")
        calls.append((call.func.id, arguments))
    return calls


class CounterPool:
    """Lends :class:`CounterEnvironment`, at most ``max_worlds`` at a time; every step takes ``step_seconds``."""

    dataset = "counter"
    description = Description(numbered=True, groups="groups of tasks")

    def __init__(
        self,
        token_spans: TokenSpans,
        max_worlds: int = 64,
        observation_max_tokens: int = 200,
        step_seconds: float = 0.0,
    ) -> None:
        self.token_spans = token_spans
        self.observation_max_tokens = observation_max_tokens
        self.step_seconds = step_seconds
        self._slots = Slots(max_worlds)

    async def open(self) -> None:
        """Do nothing: this pool has no servers to start."""

    def tasks(self, split: str) -> list[str]:
        return tasks_of_split(TARGETS, split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            if not any(task_id in targets for targets in TARGETS.values()):
                raise UnknownTask(f"no task {task_id!r} in dataset {self.dataset}")

    async def acquire(self, episode_id: str) -> CounterEnvironment:
        await self._slots.take()
        return CounterEnvironment(self)

    def release(self) -> None:
        self._slots.give_back()

    def status(self) -> PoolStatus:
        return PoolStatus(self._slots.taken, self._slots.waiting)

    async def close(self) -> None:
        """Refuse the episodes that still wait for one of the ``max_worlds`` slots."""
        self._slots.close()
