"""Chooses the tasks that each training iteration visits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description

NOBODY: Mapping[str, int] = MappingProxyType({})


class TaskSampler:
    """Seeded passes over all tasks; a pass visits every task once.

    A pass is a shuffle of the *sorted* tasks under ``(seed, pass number)``, so it depends neither on the order in which
    the tasks were given nor on earlier calls. Within a pass, every group gives its first task before any group gives
    its second: tasks of a group are much alike, and an iteration with many of one group says little about others. An
    iteration that reaches the end of a pass continues with the next pass. Tasks that it already holds come later in
    that pass, so no iteration has a task twice. A task that rests when its turn comes has no turn in that pass.

    Args:
        environment: knows which group a task belongs to.
    """

    def __init__(
        self, tasks: Sequence[str], tasks_per_iteration: int, seed: int, environment: Description = DEFAULT_DESCRIPTION
    ) -> None:
        self._environment = environment
        self._tasks = sorted(set(tasks))
        if not 1 <= tasks_per_iteration <= len(self._tasks):
            raise ValueError(
                f"tasks_per_iteration is {tasks_per_iteration}, but must lie between 1 and the number of tasks, "
                f"{len(self._tasks)}"
            )
        self._tasks_per_iteration = tasks_per_iteration
        self._seed = seed
        self._pass = 0
        self._queue = self._shuffled(0)

    def _shuffled(self, number: int) -> list[str]:
        order = list(self._tasks)
        random.Random(f"{self._seed}/{number}").shuffle(order)
        drawn: Counter[str] = Counter()

        def nth_of_its_group(task: str) -> int:
            group = self._environment.group_of(task)
            drawn[group] += 1
            return drawn[group]

        return sorted(order, key=nth_of_its_group)

    def next(self, resting: Mapping[str, int] = NOBODY) -> list[str]:
        """Draw the tasks of the next iteration, ``tasks_per_iteration`` different ones.

        Args:
            resting: task to pass over -> end of its rest. If too few tasks are left, the tasks whose rest ends first
                are woken.
        """
        tasks = set(self._tasks)
        own = sorted((until, task) for task, until in resting.items() if task in tasks)
        asleep = len(self._tasks) - self._tasks_per_iteration
        return self._draw(self._tasks_per_iteration, {task for _, task in own[max(0, len(own) - asleep) :]}, set())

    def replacements(self, of: Sequence[str], taken: Collection[str], resting: Collection[str]) -> list[str]:
        """Draw the next tasks: one for each of ``of``, or fewer if there are no more. Skip tasks that the iteration has
        already (``taken``) and tasks that rest."""
        return self._draw(len(of), set(resting), set(taken))

    def _draw(self, count: int, resting: Collection[str], taken: Collection[str]) -> list[str]:
        count = min(count, sum(task not in taken and task not in resting for task in self._tasks))
        drawn: dict[str, None] = {}
        while True:
            later, passed = [], 0
            while passed < len(self._queue) and len(drawn) < count:
                task = self._queue[passed]
                passed += 1
                if task in taken or task in drawn:
                    later.append(task)
                elif task not in resting:
                    drawn[task] = None
            self._queue = later + self._queue[passed:]
            if self._queue and len(drawn) == count:
                return list(drawn)
            self._pass += 1
            self._queue += self._shuffled(self._pass)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; a sampler of the same tasks continues exactly from this state."""
        return {"seed": self._seed, "pass": self._pass, "queue": list(self._queue), "tasks": list(self._tasks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; raises ValueError if the state has other tasks or another seed."""
        if state.get("tasks") != self._tasks:
            raise ValueError("the sampler's state is of other tasks than the dataset and config now give")
        if state["seed"] != self._seed:
            raise ValueError(f"the sampler's state is of seed {state['seed']}, not {self._seed}")
        self._pass = int(state["pass"])
        self._queue = [str(task) for task in state["queue"]]


class UniformTaskSampler(TaskSampler):
    """Different tasks for each iteration, drawn uniformly from all, independent of earlier draws (LOOP, algorithm 1).

    In the paper, 40 tasks drawn from 24 scenarios with three tasks each cover 22 scenarios in the mean.
    """

    def _draw(self, count: int, resting: Collection[str], taken: Collection[str]) -> list[str]:
        self._pass += 1
        self._queue = []
        free = [task for task in self._tasks if task not in taken and task not in resting]
        return random.Random(f"{self._seed}/uniform/{self._pass}").sample(free, min(count, len(free)))
