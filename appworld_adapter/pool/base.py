"""The base of both AppWorld backends: the dataset, the slots, the run folder and the grader."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_environments.description import NUMBERED, Description
from agent_environments.lost_worlds import CommandsDoing, Loss, Losses, Recovery, WorldLost, answered
from agent_environments.observation import observation
from agent_environments.pool_metadata import FinishedRuns, Solution
from agent_environments.protocol import (
    EnvironmentCrashed,
    EnvironmentTimeout,
    Grade,
    PoolStatus,
    Requirement,
    TokenSpans,
)
from agent_environments.slots import Slots
from appworld_adapter import dataset as task_lists
from appworld_adapter.ground_truth import EXECUTION_SUCCESSFUL, load_solution
from appworld_adapter.making import interpreter_command
from appworld_adapter.pool import experiments
from appworld_adapter.pool.episode import AppWorldEnvironment, AppWorldRules, SealedWorld
from appworld_adapter.pool.run_folder import WorldFolder
from appworld_adapter.pool.servers import ServerSpec
from appworld_adapter.prompt import Prompt, TaskCard, task_lines
from loop_plumbing.forked_process import ForkedProcess, ForkServer

logger = logging.getLogger(__name__)

GRADE_TIMEOUT_S = 600.0
"""Seconds for one grade; an agent may have made the state large. Two of them, and one of the untouched state, fit into
the protocol's own deadline for grades."""
GRADER_MEMORY_MB = 1024
"""Memory that a grade may allocate beyond its process's inherited memory."""
GRADER_START_S = 400.0
"""Seconds for a grader server that is started again while a state waits for its grade."""
GRADER_PATIENCE_S = 200.0
"""Seconds of patience with a machine that loses graders over one state."""


class DatasetPool:
    """Lends episodes on a dataset, at most ``max_worlds`` at a time, first come, first served.

    Backends say how a world is brought up, and which servers they need.

    Args:
        token_spans: the policy's tokenizer, for cutting observations.
        python: interpreter of the AppWorld environment.
        root: folder that holds ``data/``.
        prompt: template in ``prompts/``.
        observation_max_tokens: an observation's output is cut to this many tokens.
        max_worlds: slots; a caller waits while all are taken.
        execute_timeout_s: time for one action; the engine's alarm rings then, and soon after the world is killed.
        paper_parity: the engine as the paper's authors ran it: agent code may import any module, and log-in tokens are
            signed with the engine's published constant. Costs: docs/appworld.md.
        keep_experiments: leave the worlds' states and logs in ``experiments_root``.
        experiments_root: folder for states and sockets; None: a tmpfs where the machine has one.
    """

    description = Description(
        score="TGC",
        group_score="SGC",
        groups="scenarios",
        group_pattern=NUMBERED,
        behavior=("appworld_adapter.behavior:AppWorldBehavior",),
    )

    def __init__(
        self,
        token_spans: TokenSpans,
        python: str,
        root: str,
        prompt: str = "loop",
        observation_max_tokens: int = 3000,
        max_worlds: int = 64,
        execute_timeout_s: float = 100.0,
        paper_parity: bool = False,
        keep_experiments: bool = False,
        experiments_root: str | None = None,
    ) -> None:
        if keep_experiments and experiments_root is None:
            raise ValueError("keep_experiments needs experiments_root, a folder to keep them in")
        if min(max_worlds, observation_max_tokens, execute_timeout_s) < 1:
            raise ValueError("max_worlds, observation_max_tokens and execute_timeout_s must be at least 1")
        self.root = Path(root).absolute()
        self.dataset = task_lists.dataset_name(root)
        self.rules = AppWorldRules(Prompt(prompt), token_spans, observation_max_tokens, float(execute_timeout_s))
        self.replays = 0
        self.losses = Losses()
        self._python = os.path.abspath(python)  # servers run in a folder of their own
        self._paper_parity = paper_parity
        self._keep = keep_experiments
        self._experiments_root = experiments_root
        self._max_worlds = max_worlds
        self._slots = Slots(max_worlds)
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._open: set[AppWorldEnvironment] = set()
        self._run_folder: WorldFolder | None = None
        self._servers: dict[str, ForkServer] = {}
        self._closing = False

    @classmethod
    def packages(cls, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the version of the engine under ``python``, where there is one."""
        site = Path(str(config.get("python"))).parent.parent / "lib"
        names = [
            info.name.removesuffix(".dist-info") for info in site.glob("python*/site-packages/appworld-*.dist-info")
        ]
        return {name: number for name, _, number in (text.partition("-") for text in names)}

    @classmethod
    def difficulties(cls, root: Path, task_ids: Sequence[str]) -> dict[str, int]:
        """Return the difficulty of each task; {} where one has none: the real test splits may come without them."""
        try:
            return {task: task_lists.difficulty_of(root, task) for task in task_ids}
        except (FileNotFoundError, KeyError):
            return {}

    @classmethod
    def keeping_states(cls, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the options with which worlds leave their final states in ``folder``."""
        return {**config, "keep_experiments": True, "experiments_root": str(folder)}

    @classmethod
    def write_states(cls, config: Mapping[str, Any], runs: FinishedRuns, states: Path, folder: Path) -> list[str]:
        """Write an experiment per run in AppWorld's own layout; returns the commands with which the engine grades them.

        Raises:
            MissingState: a state was not kept.
        """
        names = experiments.write_experiments(runs, states, Path(str(config["root"])), folder)
        return [f"appworld evaluate {name} {experiments.split_name(runs.split)} --root {folder}" for name in names]

    @classmethod
    def solutions(cls, root: Path, split: str, prompt: str, token_spans: TokenSpans) -> tuple[str, list[Solution]]:
        """Return the dataset's name and its ground-truth solutions of a split, all of whose turns succeed.

        Raises:
            ValueError, OSError, UnknownTask: no such dataset, split or prompt, or no solution of a task.
        """
        template, solved = Prompt(prompt), []
        for task in task_lists.load_split(root, split):
            card = TaskCard.load(root, task)
            success = observation(EXECUTION_SUCCESSFUL, task_lines(card), len(EXECUTION_SUCCESSFUL), token_spans)
            steps = [(turn.action, success) for turn in load_solution(root, task)]
            solved.append(Solution(task, template.messages(card), steps))
        return task_lists.dataset_name(root), solved

    def preflight(self, split: str | Sequence[str]) -> list[str]:
        """Return the tasks of a split, or the given ones.

        Raises:
            FileNotFoundError: the engine is missing.
            UnknownTask: no such split or task.
        """
        if not Path(self._python).exists():
            raise FileNotFoundError(
                f"config.python: {self._python} does not exist: run {interpreter_command(self._python)}, or set "
                "APPWORLD_PYTHON"
            )
        return task_lists.load_split(self.root, split)

    @property
    def run_folder(self) -> WorldFolder:
        if self._run_folder is None:
            raise EnvironmentCrashed("the pool is not open")
        return self._run_folder

    async def open(self) -> None:
        """Start the backend's servers, and the grader.

        Raises:
            FileNotFoundError: the AppWorld interpreter is missing.
            PermissionError: the sandbox is weaker than the config demands.
            EnvironmentCrashed: a server did not start.
        """
        if not os.access(self._python, os.X_OK):
            raise FileNotFoundError(
                f"no AppWorld interpreter at {self._python}: run {interpreter_command(self._python)}, or set `python` "
                "to one that has appworld"
            )
        self._run_folder = await asyncio.to_thread(
            WorldFolder.create, self._experiments_root, self.root, self._keep, self._max_worlds
        )
        results = await asyncio.gather(self._open_worlds(), self._open_server("grader"), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result

    async def _open_worlds(self) -> None:
        """Start the servers of worlds."""
        raise NotImplementedError

    async def _bring_up(self, card: TaskCard, experiment: str) -> SealedWorld:
        """Return a fresh world of a task that the agent view shows."""
        raise NotImplementedError

    async def bring_up(self, card: TaskCard, experiment: str) -> SealedWorld:
        """Return a fresh world; two at a time per processor, whatever the number of slots."""
        await asyncio.to_thread(self.run_folder.show_task, card.task_id)
        async with self._starting:
            return await self._bring_up(card, experiment)

    async def _open_server(self, role: str) -> Mapping[str, Any]:
        """Start the server of ``role``; return its own report."""
        server = self._servers[role] = (await self._server_spec(role)).server()
        return await server.start()

    async def _child(self, role: str) -> ForkedProcess:
        """Return a process of the server of ``role``, which is started again if it died."""
        if self._closing:
            raise EnvironmentCrashed("the pool is closed")
        return await self._servers[role].fork()

    async def _server_spec(self, role: str) -> ServerSpec:
        run = self.run_folder
        settings = {"memory_mb": GRADER_MEMORY_MB}
        return ServerSpec(role, self._python, run.path, run.grader, self._first_task(), settings)

    def _first_task(self) -> str:
        """Return any task, for the warm-up."""
        return min(path.parent.name for path in (self.root / "data" / "tasks").glob("*/specs.json"))

    async def grade(self, task_id: str, experiment: str) -> Grade:
        """Have the saved state of ``experiment`` graded.

        A grader that fails on a state grades the same task's untouched state, and then tries once more: if it can grade
        the untouched one only, this state cannot be graded.

        Raises:
            EnvironmentCrashed: the grader is gone, or cannot grade even the untouched state.
        """
        answer = await self._graded(task_id, experiment)
        if not answer["ok"]:
            logger.warning("a state of %s was not graded: %s", task_id, answer["message"])
            untouched = await self._graded(task_id, None)
            if not untouched["ok"]:
                raise EnvironmentCrashed(f"{task_id} cannot be graded, even untouched: {untouched['message']}")
            answer = await self._graded(task_id, experiment)
        if not answer["ok"]:
            return Grade.of_ungradable(answer["message"])
        requirements = tuple(
            Requirement(test["requirement"], passed, no_op_pass=test["label"] == "no_op_pass")
            for passed, tests in ((True, answer["passes"]), (False, answer["failures"]))
            for test in tests
        )
        return Grade(len(answer["passes"]) / answer["num_tests"], answer["success"], requirements)

    async def _graded(self, task_id: str, experiment: str | None) -> dict[str, Any]:
        """Return the grader's answer; ``ok`` is false for a state that takes it too long, or ends its processes."""
        recovery = Recovery(self.losses, experiment or task_id, GRADER_PATIENCE_S)
        try:
            return await recovery.run(lambda: self._graded_once(task_id, experiment))
        except (CommandsDoing, EnvironmentTimeout) as error:
            return {"ok": False, "message": str(error)}

    async def _graded_once(self, task_id: str, experiment: str | None) -> dict[str, Any]:
        await self._grader_server()
        try:
            process = await self._child("grader")
        except EnvironmentCrashed as error:
            raise WorldLost(str(error), Loss.REFUSED) from error
        try:
            async with asyncio.timeout(GRADE_TIMEOUT_S):
                return await answered(
                    process.exchange({"task_id": task_id, "experiment": experiment}), "the grader was lost"
                )
        except TimeoutError as error:
            raise EnvironmentTimeout(f"grading {task_id} took more than {GRADE_TIMEOUT_S:.0f} s") from error
        finally:
            process.kill()

    async def _grader_server(self) -> None:
        """Wait until the grader server runs. It goes on starting even if nobody waits for it any more.

        Raises:
            EnvironmentCrashed: it was late. The protocol's own deadline for grades would make the state ungradable.
            WorldLost: it does not start.
        """
        try:
            async with asyncio.timeout(GRADER_START_S):
                await self._servers["grader"].start()
        except TimeoutError as error:
            raise EnvironmentCrashed(f"no grader within {GRADER_START_S:g} s") from error
        except (EnvironmentCrashed, OSError) as error:
            raise WorldLost(str(error), Loss.REFUSED) from error

    def tasks(self, split: str) -> list[str]:
        return task_lists.load_split(self.root, split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        task_lists.check_tasks(self.root, task_ids)

    async def acquire(self, episode_id: str) -> AppWorldEnvironment:
        await self._slots.take()
        environment = AppWorldEnvironment(self, episode_id)
        self._open.add(environment)
        return environment

    async def release(self, environment: AppWorldEnvironment, experiment: str) -> None:
        """Give back the slot of an environment that closes, which calls this once."""
        self._open.discard(environment)
        self._slots.give_back()
        if self._run_folder is not None:
            await asyncio.to_thread(self._run_folder.remove_experiment, experiment)

    def status(self) -> PoolStatus:
        """Return counters for the node's metrics page."""
        losses = dict(self.losses.counts)
        restarts = sum(server.restarts for server in self._servers.values())
        return PoolStatus(len(self._open), self._slots.waiting, restarts, {"replays": self.replays}, losses)

    async def close(self) -> None:
        """End all worlds and servers, and remove the run folder. May be called twice."""
        self._closing = True
        self.losses.close()
        self._slots.close()
        for environment in list(self._open):
            await environment.close()
        await self._close_worlds()
        for server in self._servers.values():
            await server.close()
        if self._run_folder is not None:
            await asyncio.to_thread(self._run_folder.remove)

    async def _close_worlds(self) -> None:
        """End the backend's further processes besides the servers."""
