"""Plays tasks with the right answer, with nonsense and with nothing, before anything is trained.

A reward that gives nothing for the right answer, or something for no answer, trains a policy for nothing; these
episodes reveal it in seconds, without a model. The right answer comes from a file's ``solve(task)``, from a field of
its tasks, or from the environment's own expert. None of these episodes is scored or trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_environments.protocol import EnvironmentFault, EnvironmentPool, Message, PoolWithExpert
from loop_plumbing.breakage import error_line
from loop_plumbing.separate_task import result_of
from loop_recipes.own_task.play import Agent, Played, play_task, quiet

ORACLE_TASKS = 20
"""Maximum of tasks to play, unless more are asked for."""
PATIENCE_S = 60.0
"""Seconds after which no further task begins: an environment may be slow."""
SOLVE = "solve(task)"
EXPERT = "the environment's expert"
LOOK = "look at the reward, whose answer is a text (compare it with str(target))"
CURE = f"write {SOLVE}, which gives the agent's right turns"
NONSENSE = "wibble 7351"
"""A turn that is right in no task."""


@dataclass
class Oracle:
    """The result of trial episodes: the episodes with nothing done, the reward of nonsense in each task, and the
    highest reward of a right answer.

    ``tried`` names the answers tried as right, ``untried`` says why a task could not be tried. ``broke`` is the first
    failure.
    """

    of: int
    solves: bool
    nothing: list[Played] = field(default_factory=list)
    nonsense: dict[str, float] = field(default_factory=dict)
    right: dict[str, float] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    untried: dict[str, str] = field(default_factory=dict)
    broke: str = ""

    @property
    def right_is_worth_nothing(self) -> bool:
        """True if right answers were tried, and earned 0 in every task."""
        return bool(self.right) and not any(self.right.values())

    @property
    def lines(self) -> list[str]:
        """Return a line on right answers and a line on doing nothing, then a warning for each wrong reward."""
        paid = {task: reward for task, reward in self.nonsense.items() if reward > 0.0}
        rewards = [played.grade.reward for played in self.nothing]
        idle = f"doing nothing earns {_mean(rewards)} on average of {self._tasks(len(rewards))}"
        lines = [f"right:    {self._right_text()}", f"nothing:  {idle}"]
        if self.right_is_worth_nothing:
            lines.append(f"warning:  right answers should earn 1; {self.cure}")
        if any(rewards):
            lines.append("warning:  doing nothing should earn 0: the agent may learn to do nothing")
        elif paid:
            task = next(iter(paid))
            lines.append(
                f"warning:  a turn of nonsense earns something in {len(paid)} of {self._tasks(len(self.nonsense))}, "
                f"such as {task} ({paid[task]:.3g}), where it should earn 0: look at the reward"
            )
        return lines

    @property
    def cure(self) -> str:
        """The advice to give if right answers earn nothing."""
        if self.broke:
            return self.broke
        if self.solves:
            return f"{LOOK}, and at {SOLVE}"
        return LOOK if EXPERT in self.tried else f"{LOOK}, or {CURE}"

    def _right_text(self) -> str:
        left = ""
        if self.untried:
            task, why = next(iter(self.untried.items()))
            count = f"{len(self.untried)} tasks" if self.right else "right answers"
            left = f"{count} could not be tried ({task}: {why})"
        if not self.right:
            return left if EXPERT in self.tried else f"{left}; {CURE}"
        rewards = list(self.right.values())
        short = [task for task, reward in self.right.items() if reward < 1.0]
        text = f"{self._what()} earns {_mean(rewards)} on average of {self._tasks(len(rewards))}"
        if short and any(rewards):
            text += f"; less than 1 on {len(short)} of them, such as {short[0]} ({self.right[short[0]]:.3g})"
        broke = "" if self.right_is_worth_nothing else self.broke  # the warning has it
        return "; ".join(each for each in (text, broke, left) if each)

    def _what(self) -> str:
        if self.solves:
            return SOLVE
        if EXPERT in self.tried:
            return EXPERT
        if len(self.tried) == 1:
            return f"the field {self.tried[0]} as the answer"
        return f"one of the fields {', '.join(self.tried)} as the answer"

    def _tasks(self, count: int) -> str:
        return f"{count} tasks" if count == self.of else f"{count} of {self.of} tasks"


def ask_oracle(pool: EnvironmentPool, solves: bool, tasks: Callable[[], Sequence[str]], most: int) -> Oracle:
    """Play up to ``most`` tasks, spread evenly, with the right answer, with nonsense and with nothing.

    Args:
        pool: not yet open; it is closed at the end.
        solves: whether the pool's file has a function ``solve(task)``.
        tasks: gives the tasks once the pool is open.

    Raises:
        EnvironmentFault, ValueError, OSError: from the environment.
    """
    with quiet("agent_environments"):  # a wrong guess of the right answer may break something
        return result_of(_ask(pool, solves, tasks, most))


def spread(task_ids: Sequence[str], most: int) -> list[str]:
    """Return at most ``most`` tasks at even distances, because neighbours are often of one kind."""
    count = min(most, len(task_ids))
    return [task_ids[number * len(task_ids) // count] for number in range(count)]


async def _ask(pool: Any, solves: bool, tasks: Callable[[], Sequence[str]], most: int) -> Oracle:
    until = time.monotonic() + PATIENCE_S
    try:
        await pool.open()
        task_ids = tasks()
        oracle = Oracle(len(task_ids), solves)
        for task_id in spread(task_ids, most):
            oracle.nothing.append(await play_task(pool, task_id, _turns_of([])))
            oracle.nonsense[task_id] = (await play_task(pool, task_id, _turns_of([NONSENSE]))).grade.reward
            if solves:
                await _try(pool, oracle, task_id, "", _solving)
            elif hasattr(pool, "field_answers"):  # of a file
                await _try_fields(pool, oracle, task_id)
            else:
                await _try_expert(pool, oracle, task_id)
            if time.monotonic() > until:
                break
    finally:
        await pool.close()
    return oracle


async def _try_expert(pool: EnvironmentPool, oracle: Oracle, task_id: str) -> None:
    oracle.tried = [EXPERT]
    if not isinstance(pool, PoolWithExpert):
        oracle.untried[task_id] = "the environment has no expert"
        return
    try:
        turns = [pool.message(command) for command in await pool.expert(task_id)]
    except EnvironmentFault as error:
        oracle.untried[task_id] = str(error)
        return
    await _try(pool, oracle, task_id, EXPERT, _turns_of(turns))


async def _try_fields(pool: Any, oracle: Oracle, task_id: str) -> None:
    answers = pool.field_answers(task_id)
    if not answers:
        oracle.untried[task_id] = "no reward reads a field of the task that could be the answer"
    for name, turn in answers:
        await _try(pool, oracle, task_id, name, _turns_of([turn]))
        if oracle.right.get(task_id) == 1.0:
            break


async def _try(pool: EnvironmentPool, oracle: Oracle, task_id: str, name: str, agent: Agent) -> None:
    try:
        played = await play_task(pool, task_id, agent)
    except _SolveBroke as error:
        oracle.untried[task_id] = str(error)
        return
    grade = played.grade
    if grade.broke is not None and not oracle.broke:
        oracle.broke = f"{grade.broke.line} on task {task_id}"
    if name and name not in oracle.tried:
        oracle.tried.append(name)
    oracle.right[task_id] = max(grade.reward, oracle.right.get(task_id, 0.0))


class _SolveBroke(Exception):
    """The function ``solve`` of the user's file did not give its turns."""


def _turns_of(turns: Sequence[str]) -> Agent:
    left = iter(turns)

    async def agent(environment: Any, messages: list[Message]) -> str | None:
        return next(left, None)

    return agent


async def _solving(environment: Any, messages: list[Message]) -> str | None:
    try:
        turn: str | None = await environment.right_turn(messages[-1].content)
    except EnvironmentFault:
        raise
    except Exception as error:
        reason = error_line(error)
        raise _SolveBroke(reason if reason.startswith("solve ") else f"solve raised {reason}") from error
    return turn


def _mean(rewards: Sequence[float]) -> str:
    return f"{sum(rewards) / len(rewards):.3g}"
