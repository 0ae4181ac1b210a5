"""A taskset of the package ``verifiers`` (0.4), by its id: its tasks, its harness, its tools and its rewards.

The package stays in an interpreter of its own, where it plays each episode in a process of its own
(``workers/verifiers_worker.py``); the policy answers through the recording endpoint, as for any other program.
The reward comes from the process, over a socket that the agent does not have.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_environments.description import TOOLS_BEHAVIOR, Description
from agent_environments.harness.program import program_environment
from agent_environments.program_config import variables as environment_variables
from agent_environments.program_protocol import Connection, Ended, Figures, Offer
from agent_environments.protocol import (
    Broke,
    EnvironmentCrashed,
    Grade,
    Message,
    PoolStatus,
    StepResult,
    TokenSpans,
    UnknownTask,
)
from agent_environments.scale import Scale
from agent_environments.slots import Slots
from agent_environments.tools.tasks import SPLIT, TaskTable
from loop_plumbing.breakage import Raised
from loop_plumbing.forked_process import ForkedProcess, ForkServer, ProcessEnded

WORKER = Path(__file__).with_name("workers") / "verifiers_worker.py"
TASKS_DEADLINE_S = 600.0
PLAY_DEADLINE_S = 24 * 3600.0
"""Last resort: the node ends an episode whose time is used up, and the package has deadlines of its own."""


class VerifiersEnvironment:
    """An episode of a taskset: ``start``, ``run``, ``grade``."""

    has_world = False
    grades_itself = True
    side_calls = ()

    def __init__(self, pool: VerifiersPool, process: ForkedProcess) -> None:
        self._pool = pool
        self._process = process
        self._task_id = ""
        self._played: dict[str, Any] = {"error": "the episode ended before its taskset had graded it", "broke": False}
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Return no messages, because the taskset itself opens the conversation."""
        self._pool.check_tasks([task_id])
        self._task_id = task_id
        return []

    async def run(self, connection: Connection) -> Ended | None:
        """Play the episode until the taskset has graded it or an error ends it."""
        settings = {"base_url": connection.url_with_key, "max_turns": connection.max_turns}
        try:
            place = self._pool.place_of(self._task_id)
            self._played = await self._process.ask("play", PLAY_DEADLINE_S, **place, **settings)
        except (Raised, ProcessEnded) as error:
            self._played = {"error": str(error), "broke": True}
        failed = self._played.get("error")
        return Ended(0 if failed is None else 1, failed or "")

    async def step(self, action: str) -> StepResult:
        raise UnknownTask("a taskset has no world of ours to act in")

    def finish(self, reward: float | None, figures: Figures = MappingProxyType({})) -> None:
        """Do nothing, because the taskset grades the episode."""

    async def grade(self) -> Grade:
        """Return the taskset's rewards, scaled by the config's scale or by the one from their weights.

        Raises:
            EnvironmentCrashed: the sum of the rewards is outside the scale.
        """
        played = self._played
        if "error" in played:
            broke = Broke("taskset", played["error"]) if played["broke"] else None
            return Grade.of_ungradable(played["error"], broke)
        try:
            reward = self._pool.scale_of(self._task_id).share(played["reward"])
        except ValueError as error:  # as a 0, the best of its group would be the worst
            raise self._pool.refuse(str(error)) from error
        return Grade(reward, reward == 1.0, rewards=played["rewards"], metrics=played["metrics"])

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._pool.take_back(self._process)


class VerifiersPool:
    """Lends episodes of a taskset, first come, first served.

    Args:
        taskset: the taskset's id in the verifiers package.
        python: the interpreter that has the package and the taskset.
        env: other parts of the package's ``[env]`` section: ``taskset``, ``agent``, ``timeout``, ...
        splits: split -> the taskset's options for this split; None is the single split ``train``.
        held_out: number of tasks of a single split that form the split ``held_out`` instead of ``train``.
        limit: number of tasks used from the start of each split; None uses all.
        scale: lowest and highest sum of a task's rewards; None computes it from each task's weights, with
            rewards from 0 to 1.
        variables: additional environment variables of the taskset's processes.
        max_worlds: most episodes at a time.
    """

    description = Description(behavior=(TOOLS_BEHAVIOR,))
    runs_elsewhere = False

    def __init__(
        self,
        token_spans: TokenSpans,
        taskset: str,
        python: str,
        env: Mapping[str, Any] | None = None,
        splits: Mapping[str, Mapping[str, Any]] | None = None,
        held_out: int | None = None,
        limit: int | None = None,
        scale: Sequence[float] | None = None,
        variables: Mapping[str, str] | None = None,
        max_worlds: int = 16,
    ) -> None:
        self.dataset = taskset
        self._scale = None if scale is None else Scale.of(scale)
        self._python = python
        self._held_out = held_out
        self._table: TaskTable | None = None
        self._refusal: str | None = None
        splits = {SPLIT: {}} if splits is None else dict(splits)
        config = {"taskset": taskset, "env": dict(env or {}), "splits": splits, "limit": limit}
        own = {"PATH": f"{os.path.dirname(os.path.abspath(python))}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        environment = program_environment({**own, **environment_variables("variables", variables or {})})
        self._server = ForkServer(f"taskset {taskset}", (python, str(WORKER)), config, EnvironmentCrashed, environment)
        self._slots = Slots(max_worlds)

    async def open(self) -> None:
        """Load the taskset and read its tasks.

        Raises:
            FileNotFoundError: the interpreter does not exist.
            EnvironmentCrashed: the interpreter lacks the package or the taskset; one line.
            ValueError: as for :class:`~agent_environments.tools.tasks.TaskTable`, or the config must give the scale.
        """
        if shutil.which(self._python) is None:
            raise FileNotFoundError(f"no interpreter at {self._python}: make one with `verifiers` and the taskset")
        try:
            process = await self._server.fork()
        except EnvironmentCrashed as error:
            cure = "it needs the package verifiers 0.4 and the taskset"
            raise EnvironmentCrashed(f"{error} (the interpreter is {self._python}: {cure})") from error
        try:
            splits = await process.ask("tasks", TASKS_DEADLINE_S)
        finally:
            process.kill()
        unknown = next((row["unknown"] for rows in splits.values() for row in rows if "unknown" in row), None)
        if self._scale is None and unknown is not None:
            raise ValueError(
                f"how much a rollout of {self.dataset} may earn is unknown, as {unknown}: set "
                "environment.scale to [lowest, highest]"
            )
        self._table = TaskTable(
            {
                split: [row | {"place": {"split": split, "number": number}} for number, row in enumerate(rows)]
                for split, rows in splits.items()
            }
        )
        if self._held_out is not None:
            self._table.hold_out(self._held_out)

    @property
    def _tasks(self) -> TaskTable:
        if self._table is None:
            raise EnvironmentCrashed("the pool is not open")
        return self._table

    def tasks(self, split: str) -> list[str]:
        return self._tasks.split(split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            self._tasks[task_id]

    def place_of(self, task_id: str) -> dict[str, Any]:
        """Return a task's split and its number in the taskset. Raises UnknownTask."""
        place: dict[str, Any] = self._tasks[task_id]["place"]
        return place

    def scale_of(self, task_id: str) -> Scale:
        """Return the lowest and the highest sum of a task's rewards."""
        return self._scale or Scale(*self._tasks[task_id]["scale"])

    def refuse(self, why: str) -> EnvironmentCrashed:
        """Stop lending episodes, because the config is wrong and only lost rollouts would show it. Return the error."""
        self._refusal = self._refusal or f"taskset {self.dataset}: {why} (environment.scale: [lowest, highest])"
        return EnvironmentCrashed(self._refusal)

    async def acquire(self, episode_id: str) -> VerifiersEnvironment:
        """Lend an episode as every pool does. Raises EnvironmentCrashed if a reward has been outside its scale."""
        await self._slots.take()
        try:
            if self._refusal is not None:
                raise EnvironmentCrashed(self._refusal)
            return VerifiersEnvironment(self, await self._server.fork())
        except BaseException:
            self._slots.give_back()
            raise

    async def take_back(self, process: ForkedProcess) -> None:
        """End an episode's process and all processes that it started."""
        process.kill()
        self._slots.give_back()

    async def take(self, task_id: str | None, timeout_s: float) -> Offer | None:
        """Return None, because no episode of this pool waits for a program on another machine."""
        return None

    def status(self) -> PoolStatus:
        return PoolStatus(open_worlds=self._slots.taken, waiting=self._slots.waiting)

    async def close(self) -> None:
        self._slots.close()
        await self._server.close()
