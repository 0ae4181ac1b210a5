"""Calls the pools whose rewards see all rollouts of a task at once (``PoolOfGroups`` of the protocol).

An environment by itself grades an episode as a group of one. Only a collection has groups: there each member is graded
first without the rewards of the group, and these follow when all members have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agent_environments.plain_values import plain_grade
from agent_environments.protocol import Broke, EnvironmentCrashed, EnvironmentPool, Grade, PoolOfGroups
from loop_plumbing.breakage import error_line
from loop_plumbing.separate_task import RaisedThere, in_separate_task

logger = logging.getLogger(__name__)

DEADLINE_S = 3600.0
TRIES = 3
"""Attempts at grading a group whose grader dies by no fault of the agents."""


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
