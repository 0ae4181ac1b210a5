"""Chooses the tasks that each training iteration visits."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agent_environments.description import UNSAID, Description


class TaskSampler:
    """Seeded passes over all tasks; a pass visits every task once.

    A pass is a shuffle of the *sorted* tasks under ``(seed, pass number)``, so it depends neither on the order in which
    the tasks were given nor on earlier calls. Within a pass, every group of tasks has its first task before any has its
    second: the tasks of a group are much alike, so an iteration with many of one group says little about the others. An
    iteration that reaches the end of a pass continues with the next pass. Tasks that it already holds come later in
    that pass, so no iteration has a task twice.

    Args:
        environment: says which group a task belongs to.
    """

    def __init__(
        self, tasks: Sequence[str], tasks_per_iteration: int, seed: int, environment: Description = UNSAID
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

    def next(self) -> list[str]:
        """The tasks of the next iteration, ``tasks_per_iteration`` different ones."""
        tasks = self._queue[: self._tasks_per_iteration]
        self._queue = self._queue[len(tasks) :]
        missing = self._tasks_per_iteration - len(tasks)
        if not self._queue:
            self._pass += 1
            order = self._shuffled(self._pass)
            extra = [task for task in order if task not in tasks][:missing]
            self._queue = [task for task in order if task not in extra]
            tasks += extra
        return tasks

    def state_dict(self) -> dict[str, Any]:
        """Plain data; with it a sampler of the same tasks continues exactly here."""
        return {"seed": self._seed, "pass": self._pass, "queue": list(self._queue), "tasks": list(self._tasks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; raises ValueError if it is of other tasks or another seed."""
        if state.get("tasks") != self._tasks:
            raise ValueError("the sampler's state is of other tasks than the dataset and config now give")
        if state["seed"] != self._seed:
            raise ValueError(f"the sampler's state is of seed {state['seed']}, not {self._seed}")
        self._pass = int(state["pass"])
        self._queue = [str(task) for task in state["queue"]]


class UniformTaskSampler(TaskSampler):
    """Different tasks of each iteration, drawn uniformly from all, whatever was drawn before (LOOP, algorithm 1).

    Of the paper's 24 scenarios with three tasks each, 40 tasks hold 22 in the mean.
    """

    def next(self) -> list[str]:
        self._pass += 1
        self._queue = []
        return random.Random(f"{self._seed}/uniform/{self._pass}").sample(self._tasks, self._tasks_per_iteration)


class MixedTaskSampler:
    """A sampler for each environment of a mixture; every iteration has the same number of tasks of each.

    Args:
        shares: environment -> its share relative to the others; 1 where an environment is not named.
        kind: the sampler within an environment.
        environment: the mixture.

    Raises:
        ValueError: a share of an environment that has no tasks, or one too small or too large for an iteration's tasks.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        tasks_per_iteration: int,
        seed: int,
        shares: Mapping[str, float],
        kind: type[TaskSampler] = TaskSampler,
        environment: Description = UNSAID,
    ) -> None:
        by_environment: dict[str, list[str]] = defaultdict(list)
        for task in sorted(tasks):
            by_environment[environment.environment_of(task)].append(task)
        try:
            environment.check_environments(shares, tasks)
        except ValueError as error:
            raise ValueError(f"environments.{error}") from error
        weights = {name: shares.get(name, 1.0) for name in by_environment}
        self._samplers: dict[str, TaskSampler] = {}
        for name, count in apportion(tasks_per_iteration, weights).items():
            try:
                self._samplers[name] = kind(by_environment[name], count, seed, environment)
            except ValueError as error:
                raise ValueError(f"environment {name}: {error}") from error

    def next(self) -> list[str]:
        """The tasks of the next iteration, all different."""
        return [task for sampler in self._samplers.values() for task in sampler.next()]

    def state_dict(self) -> dict[str, Any]:
        """Plain data; with it a sampler of the same tasks continues exactly here."""
        return {"environments": {name: sampler.state_dict() for name, sampler in self._samplers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; raises ValueError if it is of other tasks or another seed."""
        environments = state.get("environments", {})
        if environments.keys() != self._samplers.keys():
            raise ValueError("the sampler's state is of other environments than the config now gives")
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(environments[name])


def apportion(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """``total`` divided in proportion to ``weights``, in whole numbers (largest remainders first; ties by name)."""
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: math.floor(part) for name, part in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts
