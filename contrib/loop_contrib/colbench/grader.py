"""Runs answers in the sandbox and compares their results with the reference's.

Each call of answer and reference has a separate process, so an answer can learn nothing about the reference or the
other calls. The comparison is made here, on plain JSON. If a reference's call gives no value, no answer passes its
test.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_environments.protocol import EnvironmentCrashed
from loop_contrib.colbench.task import ColBenchTask
from loop_plumbing.breakage import raised_as
from loop_plumbing.forked_process import ForkedProcess, ForkServer, ProcessEnded, scrubbed_environment

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("run_calls.py")
LEVELS = ("none", "rlimits", "seccomp")
"""Levels of agent_environments/sandbox; bubblewrap is for servers."""
MAX_OUTPUT = 1 << 22
"""Bytes of the value of one call."""
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    # Packages that are loaded before the process is sealed must start no threads, which would not be.
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

Outcome = dict[str, Any]


def base_python() -> str:
    """Return the interpreter below this virtual environment, so that an answer cannot import packages of ours."""
    return getattr(sys, "_base_executable", None) or sys.executable


def packages_of(code: str) -> list[str]:
    """Return the modules that ``code`` imports, and imported names that may be modules; no standard library."""
    names: dict[str, None] = {}
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                names |= dict.fromkeys(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= dict.fromkeys([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]


@dataclass(frozen=True)
class GraderLimits:
    """The resources that an answer may use."""

    memory_mb: int = 256
    """Memory, beyond that of an empty interpreter."""
    call_cpu_s: float = 2.0
    """Processor time of one call."""
    answer_timeout_s: float = 300.0
    """Time for all calls of an answer; calls that are not over then have failed."""

    def __post_init__(self) -> None:
        if self.memory_mb < 1 or min(self.call_cpu_s, self.answer_timeout_s) <= 0:
            raise ValueError("grader: memory_mb must be at least 1, and times above 0")


class CodeGrader:
    """Grades answers: runs their code and the reference in a sandbox.

    Args:
        python: interpreter for answers and references.
        minimum: lowest level of the sandbox with which the grader opens.
    """

    def __init__(self, python: str, limits: GraderLimits, minimum: str) -> None:
        if minimum not in LEVELS:
            raise ValueError(f"sandbox_minimum is {minimum!r}; levels are {', '.join(LEVELS)}")
        self._limits = limits
        self._minimum = minimum
        self._expected: dict[str, list[Outcome]] = {}
        self.level = ""
        self._python = python
        self._servers: dict[tuple[str, ...], ForkServer] = {}

    async def open(self) -> None:
        """Start. Raises PermissionError if the sandbox is too weak, EnvironmentCrashed if the interpreter fails."""
        self.level = (await self._server(()).start())["level"]
        if LEVELS.index(self.level) < LEVELS.index(self._minimum):
            raise PermissionError(
                f"the strongest sandbox that works here is {self.level!r}, below sandbox_minimum {self._minimum!r}: "
                "the kernel, or the container, refuses seccomp filters; or lower sandbox_minimum"
            )

    async def close(self) -> None:
        """End the interpreters."""
        for server in self._servers.values():
            await server.close()

    def _server(self, packages: Sequence[str]) -> ForkServer:
        """Return the server that has imported the packages of these modules. A process that imported them for each call
        would take most of a grade's time."""
        imported = tuple(sorted({package.partition(".")[0] for package in packages}))
        if imported not in self._servers:
            config = {"memory_mb": self._limits.memory_mb, "cpu_s": self._limits.call_cpu_s, "packages": imported}
            name, command = f"grader ({self._python})", (self._python, "-I", str(PROGRAM))
            variables = scrubbed_environment(**VARIABLES)
            server = ForkServer(name, command, config, EnvironmentCrashed, variables, longest_answer=MAX_OUTPUT)
            self._servers[imported] = server
        return self._servers[imported]

    async def passed(self, task: ColBenchTask, code: str) -> list[bool]:
        """Return for each of the task's calls whether ``code`` gives the same result as the reference.

        Raises:
            EnvironmentCrashed: no process could start, through no fault of the answer; or the reference was cut short.
        """
        packages = packages_of(task.reference)
        if task.task_id not in self._expected:
            expected = await self._outcomes(task.reference, task.calls, packages)
            if {} in expected:  # not kept: the machine may have been too busy
                raise EnvironmentCrashed(
                    f"the reference of {task.task_id} did not end its calls in {self._limits.answer_timeout_s:g} s"
                )
            self._expected[task.task_id] = expected
            if raised := [outcome["raised"] for outcome in expected if "raised" in outcome]:
                logger.warning(
                    "%s cannot be solved: its reference gives no value for %d of %d calls (%s)",
                    *(task.task_id, len(raised), len(expected), ", ".join(sorted(set(raised)))),
                )
        outcomes = await self._outcomes(code, task.calls, packages)
        return [
            "value" in wanted and result == wanted
            for wanted, result in zip(self._expected[task.task_id], outcomes, strict=True)
        ]

    async def _outcomes(self, code: str, calls: Sequence[str], packages: Sequence[str]) -> list[Outcome]:
        """Return the outcome of each call; ``{}`` if a call has no outcome."""
        processes: list[ForkedProcess] = []
        outcomes: list[Outcome] = []
        try:
            for _ in calls:
                processes.append(await self._server(packages).fork())
                with raised_as(EnvironmentCrashed, "the grader's process is not sealed: ", ProcessEnded):
                    answer = await processes[-1].exchange_while_it_moves({"packages": packages})
                if "failed" in answer:
                    raise EnvironmentCrashed(f"the grader's process is not sealed: {answer['failed']}")
            # From here on the answer's code runs: whatever happens is its doing.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.answer_timeout_s):
                    for process, call in zip(processes, calls, strict=True):
                        outcomes.append(await _outcome(process, code, call))
        finally:
            for process in processes:
                process.kill()
        return outcomes + [{}] * (len(calls) - len(outcomes))


async def _outcome(process: ForkedProcess, code: str, call: str) -> Outcome:
    try:
        return await process.exchange({"code": code, "call": call})
    except ProcessEnded:
        return {}
