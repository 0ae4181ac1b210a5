"""Grades a group of episodes by the rewards of a user's module, in a process that has it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_environments.protocol import Broke, Grade
from agent_environments.tools.reward import JUDGE_PATIENCE_S, Reward, grade_of, together
from loop_plumbing import running_time
from loop_plumbing.breakage import Raised, error_line
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import ForkedProcess, ProcessEnded

logger = logging.getLogger(__name__)


async def group_grades(
    process: ForkedProcess, rewards: Sequence[Reward], task_id: str, inputs: Sequence[Mapping[str, Any]]
) -> list[Grade]:
    """Return the grade of each episode of a group, from the episode's own rewards and the rewards for groups.

    If a reward for groups raises, or does not return one value per episode, it grades none of them. But if the reward
    raises only because of one episode, or returns no number for it, only that episode has no grade.

    Args:
        process: a process that has imported the module.
        rewards: all rewards of the module.
        inputs: each episode's ``answer``, ``trajectory`` and ``own`` grades by reward, as a process sent them.
    """
    own = [{name: grade_of(fields) for name, fields in member["own"].items()} for member in inputs]
    members = [
        {"answer": member["answer"], "trajectory": member["trajectory"], "rewards": _stated(grades)}
        for member, grades in zip(inputs, own, strict=True)
    ]
    until = running_time.now() + JUDGE_PATIENCE_S
    graded: list[dict[str, Grade]] = [{} for _ in inputs]
    for reward in (each for each in rewards if each.group):
        judge_s = max(0.0, until - running_time.now()) if reward.takes_judge else 0.0
        asked = {"reward": reward.name, "task_id": task_id, "judge_s": judge_s}
        deadline_s = reward.deadline_s + judge_s

        async def ask(
            some: Sequence[Mapping[str, Any]], asked: Mapping[str, Any] = asked, deadline_s: float = deadline_s
        ) -> list[Grade]:
            answered = await process.ask("grade_group", deadline_s, **asked, members=list(some))
            return [replace(grade_of(each), broke=each["broke"] and Broke(**each["broke"])) for each in answered]

        try:
            grades = await _grades_of_each(ask, members, reward.name)
        except (Raised, DeadlinePassed, ProcessEnded, ValueError) as error:
            what = error_line(error)
            logger.error("reward %s grades no group: %s", reward.name, what)
            grades = [Grade.of_ungradable(what, Broke(f"reward {reward.name}", what))] * len(inputs)
            if reward.weight > 0.0:
                return grades
        for number, grade in enumerate(grades):
            graded[number][reward.name] = grade
    every = [{**mine, **theirs} for mine, theirs in zip(own, graded, strict=True)]
    return [
        replace(
            together([(reward, grades[reward.name]) for reward in rewards]),
            broke=next((grade.broke for grade in grades.values() if grade.broke is not None), None),
        )
        for grades in every
    ]


async def _grades_of_each(
    ask: Callable[[Sequence[Mapping[str, Any]]], Awaitable[list[Grade]]],
    members: Sequence[Mapping[str, Any]],
    name: str,
) -> list[Grade]:
    """Return a reward's grade of each episode. An episode over which the reward raises is ungradable and left out.

    Raises:
        Raised, DeadlinePassed, ProcessEnded: the reward fails without these episodes too.
    """
    try:
        return await ask(members)
    except Raised:
        broke: list[Broke | None] = []
        for member in members:
            try:
                await ask([member])
                broke.append(None)
            except Raised as error:
                broke.append(Broke(f"reward {name}", error_line(error)))
        if all(broke) or not any(broke):
            raise
    rest = iter(await ask([member for member, why in zip(members, broke, strict=True) if why is None]))
    return [next(rest) if why is None else Grade.of_ungradable(why.what, why) for why in broke]


def _stated(grades: Mapping[str, Grade]) -> dict[str, float]:
    """Return reward name -> the number that the reward returned for an episode, without ungradable ones."""
    return {
        name: {**grade.rewards, **grade.metrics}.get(name, grade.reward)
        for name, grade in grades.items()
        if grade.ungradable is None
    }
