"""Chooses the tasks of each training iteration from a mixture of environments."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_plumbing.breakage import raised_as
from loop_plumbing.grouping import grouped
from loop_recipes.rollouts.task_sampler import NOBODY, TaskSampler


class MixedTaskSampler:
    """A sampler for each environment of a mixture; every iteration has the same number of tasks of each.

    Args:
        shares: environment -> share relative to the other environments; 1 for an environment that is not named.
        kind: the sampler within an environment.
        environment: the mixture.

    Raises:
        ValueError: an environment has a share but no tasks, or a share does not fit the number of an iteration's tasks.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        tasks_per_iteration: int,
        seed: int,
        shares: Mapping[str, float],
        kind: type[TaskSampler] = TaskSampler,
        environment: Description = DEFAULT_DESCRIPTION,
    ) -> None:
        self._environment = environment
        by_environment = grouped((environment.environment_of(task), task) for task in sorted(tasks))
        with raised_as(ValueError, "environments."):
            environment.check_environments(shares, tasks)
        weights = {name: shares.get(name, 1.0) for name in by_environment}
        self._samplers: dict[str, TaskSampler] = {}
        for name, count in apportion(tasks_per_iteration, weights).items():
            with raised_as(ValueError, f"environment {name}: "):
                self._samplers[name] = kind(by_environment[name], count, seed, environment)

    def next(self, resting: Mapping[str, int] = NOBODY) -> list[str]:
        """Draw tasks like :meth:`~loop_recipes.rollouts.task_sampler.TaskSampler.next`."""
        return [task for sampler in self._samplers.values() for task in sampler.next(resting)]

    def replacements(self, of: Sequence[str], taken: Collection[str], resting: Collection[str]) -> list[str]:
        """Draw like :meth:`~loop_recipes.rollouts.task_sampler.TaskSampler.replacements`; each new task has the
        environment of the task that it replaces."""
        of_each: dict[str, list[str]] = {name: [] for name in self._samplers}
        for task in of:
            of_each[self._environment.environment_of(task)].append(task)
        drawn = (self._samplers[name].replacements(tasks, taken, resting) for name, tasks in of_each.items() if tasks)
        return [task for tasks in drawn for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; a sampler of the same tasks continues exactly from this state."""
        return {"environments": {name: sampler.state_dict() for name, sampler in self._samplers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; raises ValueError if the state has other tasks or another seed."""
        environments = state.get("environments", {})
        if environments.keys() != self._samplers.keys():
            raise ValueError("the sampler's state is of other environments than the config now gives")
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(environments[name])


def apportion(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Divide ``total`` in proportion to ``weights``, in whole numbers (largest remainders first; ties by name)."""
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: math.floor(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts
