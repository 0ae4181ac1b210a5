"""Holds any environment to the protocol's rule that agent code cannot void its episode.

A wrapper, so that an exception which nobody foresaw ends the episode in a grade, not in a second try.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from agent_environments.observation import FAILURE_HEAD
from agent_environments.plain_values import plain_grade, plain_messages, plain_result
from agent_environments.protocol import (
    Broke,
    Environment,
    EnvironmentCrashed,
    EnvironmentFault,
    EnvironmentTimeout,
    Grade,
    GroupedEnvironment,
    Member,
    Message,
    StepResult,
    ToolUse,
)
from loop_plumbing.breakage import error_line, last_line
from loop_plumbing.separate_task import RaisedThere, in_separate_task

logger = logging.getLogger(__name__)

GRADE_DEADLINE_S = 3600.0
STEP_BROKE = FAILURE_HEAD + " Traceback:\nThe environment broke while it ran this code. The episode is over."


class GuardedEnvironment:
    """Wrap the :class:`Environment` ``inner`` so that it raises only the protocol's errors and returns plain values.

    An unforeseen exception in ``start`` is the environment's fault, because the agent has had no turn yet. A later one
    may be the agent's doing: in ``step`` it ends the episode, in ``grade`` it makes the state ungradable. A grade that
    takes longer than :data:`GRADE_DEADLINE_S` or holds invalid values also makes the state ungradable. The grade names
    the first fault.
    """

    def __init__(self, environment: Environment) -> None:
        self.inner = environment
        self._broke: Broke | None = None
        self._tools: dict[str, ToolUse] = {}

    async def start(self, task_id: str) -> list[Message]:
        async def started() -> list[Message]:
            return plain_messages(await self.inner.start(task_id))

        try:
            return await in_separate_task(started)
        except RaisedThere as raised:
            if isinstance(raised.error, EnvironmentFault):
                raise raised.error from None
            logger.error("the environment broke as it started %s", task_id, exc_info=raised.error)
            raise EnvironmentCrashed(
                f"the environment broke as it started {task_id}: {error_line(raised.error)}"
            ) from raised.error

    async def step(self, action: str) -> StepResult:
        async def plain_step() -> StepResult:
            return plain_result(await self.inner.step(action))

        try:
            result = await in_separate_task(plain_step)
        except RaisedThere as raised:
            error = raised.error
            if isinstance(error, EnvironmentCrashed | EnvironmentTimeout):
                raise error from None
            if isinstance(error, TimeoutError):
                message = last_line(error).partition(": ")[2]
                raise EnvironmentTimeout(message or "a step took too long") from error
            logger.error("the environment broke in a step: it ends the episode, which is graded", exc_info=error)
            result = StepResult(STEP_BROKE, done=True, failed=True, broke=Broke("step", error_line(error)))
        self._note(result)
        return result

    async def grade(self) -> Grade:
        async def graded() -> Member:
            return Member(plain_grade(await self.inner.grade()))

        return (await self._graded(graded)).grade

    async def grade_member(self) -> Member:
        """Grade an episode of a group, with the same protection as :meth:`grade`."""

        async def graded() -> Member:
            assert isinstance(self.inner, GroupedEnvironment), "its pool grades groups"
            member = await self.inner.grade_member()
            return replace(member, grade=plain_grade(member.grade))

        return await self._graded(graded)

    async def _graded(self, graded: Callable[[], Awaitable[Member]]) -> Member:
        try:
            async with asyncio.timeout(GRADE_DEADLINE_S):
                member = await in_separate_task(graded)
        except TimeoutError:
            what = f"no grade within {GRADE_DEADLINE_S:g} s"
            member = Member(Grade.of_ungradable(what, Broke("grade", what)))
        except RaisedThere as raised:
            error = raised.error
            if isinstance(error, EnvironmentCrashed):
                raise error from None
            logger.error("the environment broke as it graded", exc_info=error)
            what = error_line(error)
            member = Member(Grade.of_ungradable(what, Broke("grade", what)))
        grade = member.grade
        tools = grade.tools or tuple(self._tools.values())
        return replace(member, grade=replace(grade, broke=self._broke or grade.broke, tools=tools))

    def _note(self, result: StepResult) -> None:
        self._broke = self._broke or result.broke
        for use in result.tools:
            known = self._tools.get(use.tool, ToolUse(use.tool, 0, 0))
            calls, raised = known.calls + use.calls, known.raised + use.raised
            self._tools[use.tool] = ToolUse(use.tool, calls, raised, known.what or use.what)

    async def close(self) -> None:
        try:
            await in_separate_task(self.inner.close)
        except RaisedThere as raised:
            raise EnvironmentCrashed(
                f"the environment broke as it closed: {error_line(raised.error)}"
            ) from raised.error
