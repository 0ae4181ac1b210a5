"""Holds any environment to the protocol's rule that agent code cannot void its episode.

A wrapper, so that an exception which nobody foresaw ends the episode in a grade, not in a second try.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from agent_environments.observation import FAILURE_HEAD, printable
from agent_environments.protocol import (
    Environment,
    EnvironmentCrashed,
    EnvironmentFault,
    EnvironmentTimeout,
    Grade,
    Message,
    StepResult,
)

logger = logging.getLogger(__name__)

GRADE_DEADLINE_S = 1800.0
STEP_BROKE = FAILURE_HEAD + " Traceback:\nThe environment broke while it ran this code. The episode is over."


def ends_this_task(error: BaseException) -> bool:
    """Whether ``error`` says that the task which runs now is cancelled, or closed.

    All else that a function raises is its own, be it ``SystemExit``, or the cancellation of a task of its own. Taken
    for ours, the one would end the node, and the other an episode that nobody has ended, without a trace of it.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


class NoVoiding:
    """An :class:`Environment` around another one, which raises the protocol's own errors only.

    Before the first step an unforeseen exception is the environment's fault. From then on agent code may be behind it:
    out of ``step`` it ends the episode, out of ``grade`` it makes the state ungradable, and so does a grade that is not
    there after :data:`GRADE_DEADLINE_S`.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._acted = False

    @property
    def inner(self) -> Environment:
        """The environment that it is around."""
        return self._environment

    async def start(self, task_id: str) -> list[Message]:
        try:
            return await self._environment.start(task_id)
        except EnvironmentFault:
            raise
        except BaseException as error:
            if ends_this_task(error):
                raise
            logger.exception("the environment broke as it started %s", task_id)
            raise EnvironmentCrashed(f"the environment broke as it started {task_id}: {error!r}") from error

    def begin_acting(self) -> None:
        """The agent acts from now on, by another way than ``step``."""
        self._acted = True

    async def step(self, action: str) -> StepResult:
        self.begin_acting()
        try:
            result = await self._environment.step(action)
            return replace(result, observation=printable(result.observation))
        except EnvironmentFault:
            raise
        except TimeoutError as error:
            raise EnvironmentTimeout(str(error) or "a step took too long") from error
        except BaseException as error:
            if ends_this_task(error):
                raise
            logger.exception("the environment broke in a step: its episode is over, and is graded as it stands")
            return StepResult(STEP_BROKE, done=True, failed=True)

    async def grade(self) -> Grade:
        try:
            async with asyncio.timeout(GRADE_DEADLINE_S):
                grade = await self._environment.grade()
            if not 0.0 <= grade.reward <= 1.0:  # nor is NaN
                raise ValueError(f"the reward {grade.reward} is outside [0, 1]")
            return grade
        except (EnvironmentTimeout, TimeoutError) as error:
            return self._ungradable(str(error) or f"no grade within {GRADE_DEADLINE_S:g} s")
        except EnvironmentFault:
            raise
        except BaseException as error:
            if ends_this_task(error):
                raise
            logger.exception("the environment broke as it graded")
            return self._ungradable(repr(error))

    def _ungradable(self, why: str) -> Grade:
        if not self._acted:
            raise EnvironmentCrashed(f"there is no grade, though nothing was done: {why}")
        return Grade.of_ungradable(why)

    async def close(self) -> None:
        try:
            await self._environment.close()
        except BaseException as error:
            if isinstance(error, Exception) or ends_this_task(error):
                raise
            raise EnvironmentCrashed(f"the environment broke as it closed: {error!r}") from error
