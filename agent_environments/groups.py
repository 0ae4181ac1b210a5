"""Rewards that see all rollouts of a task at once: the interfaces of an environment and a pool, and their caller.

An environment by itself grades an episode as a group of one. Only a collection has groups: there each member is graded
first without the rewards of the group, and these follow when all members have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agent_environments.plain_values import plain_grade
from agent_environments.protocol import Broke, Environment, EnvironmentCrashed, EnvironmentPool, Grade
from loop_plumbing.breakage import error_line
from loop_plumbing.separate_task import RaisedThere, in_separate_task

logger = logging.getLogger(__name__)

DEADLINE_S = 3600.0
TRIES = 3
"""Attempts at grading a group whose grader dies by no fault of the agents."""


@dataclass(frozen=True)
class Member:
    """An episode of a group. ``group_input`` holds the JSON data from which the episode's pool grades the group.

    Without ``group_input`` the episode is not graded in the group: its ``grade`` is final, as for a state that cannot
    be graded. Otherwise ``grade`` holds only a fault in the episode, the use of tools, and the program's figures.
    """

    grade: Grade
    group_input: Mapping[str, Any] | None = None


@runtime_checkable
class GroupedEnvironment(Environment, Protocol):
    """Additional interface of an environment whose episodes may be graded with others of the same task."""

    async def grade_member(self) -> Member:
        """Grade as :meth:`~agent_environments.protocol.Environment.grade` does, for a pool that grades groups."""


@runtime_checkable
class PoolOfGroups(EnvironmentPool, Protocol):
    """Additional interface of a pool that may grade all rollouts of a task at once."""

    def grades_groups(self, task_id: str) -> bool:
        """Return whether the pool grades all rollouts of this task at once."""

    async def grade_group(self, task_id: str, inputs: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """Return the grade of each member of a group, in the order of the members.

        Raises:
            EnvironmentCrashed: no process can grade; the call may be repeated.
        """


def grades_groups(pool: EnvironmentPool, task_id: str) -> bool:
    """Return whether a pool grades the rollouts of a task together."""
    return isinstance(pool, PoolOfGroups) and pool.grades_groups(task_id)


async def grade_group(pool: EnvironmentPool, task_id: str, inputs: Sequence[Mapping[str, Any]]) -> list[Grade]:
    """Grade each member of a group; if grading fails for any reason, return ungradable grades that state the reason."""

    async def graded() -> list[Grade]:
        assert isinstance(pool, PoolOfGroups), "its members were graded as such"
        grades = [plain_grade(grade) for grade in await pool.grade_group(task_id, inputs)]
        if len(grades) != len(inputs):
            raise ValueError(f"a group of {len(inputs)} was given {len(grades)} grades")
        return grades

    what = ""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await in_separate_task(graded)
        except TimeoutError:
            what = f"no grade within {DEADLINE_S:g} s"
            break
        except RaisedThere as raised:
            logger.error("a group of task %s was not graded", task_id, exc_info=raised.error)
            what = error_line(raised.error)
            if not isinstance(raised.error, EnvironmentCrashed):
                break
    return [Grade.of_ungradable(what, Broke("grade", what))] * len(inputs)
