"""Several environments as one: every task id carries the name of its environment, ``<environment>/<task id>``.

    environment:
      name: mixed
      environments:
        sums: {name: tools, module: my_tools.py}
        craft: {name: textcraft, python: .venv-worlds/bin/python, splits: {dev: test}}

The trainer sets an environment's share of an iteration and the turns of its episodes (``collection.environments``).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agent_environments.description import Description, description_of, environment_of
from agent_environments.groups import grades_groups
from agent_environments.protocol import (
    Environment,
    EnvironmentPool,
    Grade,
    GroupedEnvironment,
    Member,
    Message,
    PoolOfGroups,
    PoolStatus,
    StepResult,
    TokenSpans,
    UnknownTask,
    create_pool,
    is_harness,
)
from loop_plumbing.breakage import raised_as

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class MixedEnvironment:
    """An episode that is played in the environment of its task."""

    def __init__(self, pool: MixedPool, episode_id: str) -> None:
        self._pool = pool
        self._episode_id = episode_id
        self._environment: Environment | None = None

    async def take_place(self, task_id: str) -> None:
        """Wait for a slot in the task's own environment."""
        member, _ = self._pool.find(task_id)
        self._environment = await member.acquire(self._episode_id)

    async def start(self, task_id: str) -> list[Message]:
        """Start the episode in its task's environment; take a slot there first, unless the episode has a slot."""
        if self._environment is None:
            await self.take_place(task_id)
        return await self._started.start(self._pool.find(task_id)[1])

    async def step(self, action: str) -> StepResult:
        return await self._started.step(action)

    async def grade(self) -> Grade:
        return await self._started.grade()

    async def grade_member(self) -> Member:
        """Grade the episode as a member of a group; the task's own pool must grade groups."""
        assert isinstance(self._started, GroupedEnvironment), "its pool grades groups"
        return await self._started.grade_member()

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()

    @property
    def _started(self) -> Environment:
        assert self._environment is not None, "start comes first"
        return self._environment


class MixedPool:
    """Lends environments of several pools.

    Args:
        environments: name -> ``name`` and options of an environment, as in a node's configuration. ``splits`` maps a
            split's name to the name that this environment uses (null: the environment has no such split).

    Raises:
        ValueError: no environments, a bad name, or an environment that cannot be built; the message names it.
    """

    def __init__(self, token_spans: TokenSpans, environments: Mapping[str, Mapping[str, Any]]) -> None:
        if not environments:
            raise ValueError("environments must name at least one environment")
        self._pools: dict[str, EnvironmentPool] = {}
        self._names: dict[str, str] = {}
        self._splits: dict[str, Mapping[str, str | None]] = {}
        for name, section in environments.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"environment {name!r} must be called by letters, digits, '_', '.' and '-'")
            if "name" not in section:
                raise ValueError(f"environments.{name}: missing key 'name'")
            if is_harness(section["name"]):
                raise ValueError(f"environments.{name}: a harness cannot be part of a mixture; its world may be one")
            with raised_as(ValueError, f"environments.{name}: "):
                options = dict(section)
                self._splits[name] = options.pop("splits", None) or {}
                self._names[name] = options.pop("name")
                self._pools[name] = create_pool(self._names[name], options, token_spans)

    @property
    def description(self) -> Description:
        """The environments' descriptions; scores keep their names if all environments use the same names."""
        members = {name: description_of(self._names[name], pool) for name, pool in self._pools.items()}
        words = {(member.score, member.group_score, member.groups) for member in members.values()}
        score, group_score, groups = words.pop() if len(words) == 1 else ("success", "group success", "groups of tasks")
        return Description(score=score, group_score=group_score, groups=groups, environments=members)

    @property
    def dataset(self) -> str:
        return " + ".join(f"{name}:{pool.dataset}" for name, pool in self._pools.items())

    async def open(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for pool in self._pools.values():
                    group.create_task(pool.open())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def tasks(self, split: str) -> list[str]:
        task_ids: list[str] = []
        for name, pool in self._pools.items():
            own_split = self._splits[name].get(split, split)
            if own_split is None:
                continue
            try:
                task_ids += [f"{name}/{task_id}" for task_id in pool.tasks(own_split)]
            except UnknownTask as error:
                raise UnknownTask(f"environment {name}: {error}; say what it calls it in splits") from error
        if not task_ids:
            raise UnknownTask(f"no environment has tasks of split {split!r}")
        return task_ids

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            pool, own_id = self.find(task_id)
            pool.check_tasks([own_id])

    def find(self, task_id: str) -> tuple[EnvironmentPool, str]:
        """Return the pool of a task's environment, and the task's id there."""
        name = environment_of(task_id)
        if name not in self._pools:
            raise UnknownTask(f"no task {task_id!r}: ids begin with {', '.join(f'{known}/' for known in self._pools)}")
        return self._pools[name], task_id.removeprefix(f"{name}/")

    def grades_groups(self, task_id: str) -> bool:
        """Return whether the task's own pool grades all its rollouts at once."""
        return grades_groups(*self.find(task_id))

    async def grade_group(self, task_id: str, inputs: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """Return the grades of the task's own pool."""
        pool, own_id = self.find(task_id)
        assert isinstance(pool, PoolOfGroups), "it grades groups"
        return await pool.grade_group(own_id, inputs)

    async def acquire(self, episode_id: str) -> MixedEnvironment:
        """Return at once, without a slot: the episode waits for a slot when its start names the task."""
        return MixedEnvironment(self, episode_id)

    async def acquire_for(self, episode_id: str, task_id: str) -> MixedEnvironment:
        """Wait for a slot in the task's own environment, then return an environment that holds the slot."""
        environment = MixedEnvironment(self, episode_id)
        await environment.take_place(task_id)
        return environment

    def status(self) -> PoolStatus:
        each = {name: pool.status() for name, pool in self._pools.items()}
        return PoolStatus(
            open_worlds=sum(status.open_worlds for status in each.values()),
            waiting=sum(status.waiting for status in each.values()),
            restarts=sum(status.restarts for status in each.values()),
            losses=sum((Counter(status.losses) for status in each.values()), Counter()),
            details={name: dict(status.details) for name, status in each.items()},
        )

    async def close(self) -> None:
        results = await asyncio.gather(*(pool.close() for pool in self._pools.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
