"""Grades a group of episodes by the rewards of a user's module, in a process that has it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from agent_environments.protocol import Broke, Grade, Requirement
from agent_environments.tools.reward import Reward, together
from loop_plumbing import running_time
from loop_plumbing.breakage import Raised, error_line
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import ForkedProcess, ProcessEnded

logger = logging.getLogger(__name__)

JUDGE_PATIENCE_S = 2700.0
"""For all that the rewards of an episode, or of a group, ask a judge; with a reward's own time less than the protocol
has for a grade."""


def seen_of(
    answer: str, trajectory: Sequence[Mapping[str, str]], own: Sequence[tuple[Reward, Grade]]
) -> dict[str, Any]:
    """An episode as :func:`group_grades` wants it: plain data.

    Args:
        own: what its own rewards gave.
    """
    grades = {reward.name: asdict(grade) for reward, grade in own}
    return {"answer": answer, "trajectory": list(trajectory), "own": grades}


async def group_grades(
    process: ForkedProcess, rewards: Sequence[Reward], task_id: str, seen: Sequence[Mapping[str, Any]]
) -> list[Grade]:
    """The grade of each episode of a group, from its own rewards and those of the group.

    A reward of the group that raises, or gives something else than a number for each, grades none of them.

    Args:
        process: has imported the module.
        rewards: all of the module.
        seen: by :func:`seen_of`.
    """
    own = [{name: grade_of(fields) for name, fields in member["own"].items()} for member in seen]
    members = [
        {"answer": member["answer"], "trajectory": member["trajectory"], "rewards": _stated(grades)}
        for member, grades in zip(seen, own, strict=True)
    ]
    until, broke = running_time.now() + JUDGE_PATIENCE_S, None
    given: list[dict[str, Grade]] = [{} for _ in seen]
    for reward in (each for each in rewards if each.group):
        judge_s = max(0.0, until - running_time.now()) if reward.takes_judge else 0.0
        try:
            asked = {"reward": reward.name, "task_id": task_id, "members": members, "judge_s": judge_s}
            answered = await process.ask("grade_group", reward.deadline_s + judge_s, **asked)
            grades = [grade_of(fields) for fields in answered]
        except (Raised, DeadlinePassed, ProcessEnded, ValueError) as error:
            what = error_line(error)
            logger.error("reward %s grades no group: %s", reward.name, what)
            ungradable = Grade.of_ungradable(what, Broke(f"reward {reward.name}", what))
            if reward.weight > 0.0:
                return [ungradable] * len(seen)
            broke, grades = broke or ungradable.broke, [ungradable] * len(seen)
        for number, grade in enumerate(grades):
            given[number][reward.name] = grade
    every = [{**mine, **theirs} for mine, theirs in zip(own, given, strict=True)]
    return [replace(together([(reward, grades[reward.name]) for reward in rewards]), broke=broke) for grades in every]


def grade_of(fields: Mapping[str, Any]) -> Grade:
    """The grade that a process has sent; whether its values may stand in a grade is not looked at."""
    requirements = tuple(Requirement(**each) for each in fields["requirements"])
    return Grade(**{**fields, "requirements": requirements, "broke": None, "tools": ()})


def _stated(grades: Mapping[str, Grade]) -> dict[str, float]:
    """What each reward of an episode gave, as it gave it; one that gave none is left out."""
    return {
        name: {**grade.rewards, **grade.metrics}.get(name, grade.reward)
        for name, grade in grades.items()
        if grade.ungradable is None
    }
