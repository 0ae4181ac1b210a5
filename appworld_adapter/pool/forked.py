"""AppWorld behind the environment protocol: worlds forked from one warm process, and a grader apart from them.

The processes:

    this process ── world server (warm, forks) ──▶ world process (databases, APIs) ──▶ interpreter (agent code)
         └───────── grader server (warm, forks) ──▶ grade of one saved state; alone reads the ground truth

Nothing here imports the engine: the servers run in the AppWorld environment (worker/).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_environments.description import Description
from agent_environments.lost_worlds import CommandsDoing, Loss, Losses, Recovery, WorldLost, answered
from agent_environments.protocol import (
    EnvironmentCrashed,
    EnvironmentTimeout,
    FinishedRuns,
    Grade,
    PoolStatus,
    Requirement,
    TokenSpans,
)
from agent_environments.slots import Slots
from appworld_adapter import dataset as task_lists
from appworld_adapter.making import dataset_commands, interpreter_command
from appworld_adapter.pool import experiments
from appworld_adapter.pool.bubblewrap import WORKER_FOLDER, bubblewrap_prefix
from appworld_adapter.pool.episode import AppWorldEnvironment, ForkedWorld
from appworld_adapter.pool.run_folder import STATE_LIMIT, WorldFolder
from appworld_adapter.prompt import Prompt, TaskCard
from loop_plumbing.forked_process import ForkedProcess, ForkServer, ProcessEnded, scrubbed_environment

logger = logging.getLogger(__name__)

SANDBOX_LEVELS = ("none", "rlimits", "seccomp", "bubblewrap")
WITHSTANDS = {
    "seccomp": "it reaches no file, process or network, but shares this machine's namespaces with them",
    "rlimits": "it can read every file of yours, the ground truth included, and start processes",
    "none": "it can do whatever you can, and take all memory",
}
"""The powers of agent code at the levels below bubblewrap."""
SECCOMP_MISSING = "the kernel or container refuses the seccomp filter, or it does not hold (x86-64 and aarch64 only)"
OUTPUT_CHARACTERS_PER_TOKEN = 64
"""Output is dropped, while it is produced, beyond this many characters per token that an observation may show."""
GRADE_TIMEOUT_S = 600.0
"""Seconds for one grade; an agent may have made the state large. Two of them, and one of the untouched state, fit into
the protocol's own deadline for grades."""
GRADER_MEMORY_MB = 1024
"""Memory that a grade may allocate beyond its process's inherited memory."""
GRADER_START_S = 400.0
"""Seconds for a grader server that is started again while a state waits for its grade."""
GRADER_PATIENCE_S = 200.0
"""Seconds of patience with a machine that loses graders over one state."""


def token_key(root: Path) -> bytes:
    """Return a secret key, a hash of all passwords: the same in every run, and no help in confirming a guessed answer.

    Raises:
        FileNotFoundError: the dataset has no passwords.
    """
    path = root.resolve() / "data" / "base_dbs" / "admin.db"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            rows = database.execute("select password from account_passwords order by id").fetchall()
    except sqlite3.Error as error:
        raise FileNotFoundError(
            f"no passwords in {path} ({error}): write the dataset anew ({dataset_commands(root)})"
        ) from error
    return hashlib.sha256(json.dumps(rows).encode()).digest()


def environment_of(root: Path) -> dict[str, str]:
    """Return all environment variables of a process that runs the engine on the data in ``root``."""
    return scrubbed_environment(
        APPWORLD_ROOT=str(root),
        APPWORLD_CACHE=str(root / ".cache"),
        HOME=str(root),
        PATH="/usr/bin:/bin",
        TZ=os.environ.get("TZ", "UTC"),
    )


class AppWorldPool:
    """Lend episodes on a dataset, at most ``max_worlds`` at a time, first come, first served. Each world runs in a
    sealed process of its own, which is forked in a fraction of a second.

    Args:
        token_spans: the policy's tokenizer, for cutting observations.
        python: interpreter of the AppWorld environment.
        root: folder that holds ``data/``.
        prompt: template in ``prompts/``.
        observation_max_tokens: an observation's output is cut to this many tokens.
        max_worlds: the number of slots; a caller waits while all are taken.
        execute_timeout_s: seconds for one action; then the engine's alarm rings, and soon after the world is killed.
        paper_parity: the engine as the paper's authors ran it: agent code may import any module, and log-in tokens are
            signed with the engine's published constant. Costs: docs/appworld.md.
        keep_experiments: leave the worlds' states and logs in ``experiments_root``.
        experiments_root: folder for states and sockets; None: a tmpfs if the machine has one.
        memory_limit_mb: MiB that the interpreter and its world may each allocate after their start.
        sandbox_minimum: the weakest sandbox level (agent_environments/sandbox) with which the pool may run. The pool
            uses the strongest level that works.
    """

    description = Description(
        score="TGC",
        group_score="SGC",
        groups="scenarios",
        numbered=True,
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
        memory_limit_mb: int = 1024,
        sandbox_minimum: str = "seccomp",
    ) -> None:
        if sandbox_minimum not in SANDBOX_LEVELS:
            raise ValueError(f"sandbox_minimum is {sandbox_minimum!r}; levels are {', '.join(SANDBOX_LEVELS)}")
        if keep_experiments and experiments_root is None:
            raise ValueError("keep_experiments needs experiments_root, a folder to keep them in")
        if min(max_worlds, observation_max_tokens, execute_timeout_s) < 1:
            raise ValueError("max_worlds, observation_max_tokens and execute_timeout_s must be at least 1")
        self.root = Path(root).absolute()
        self.dataset = task_lists.dataset_name(root)
        self.prompt, self.token_spans = Prompt(prompt), token_spans
        self.observation_max_tokens, self.execute_timeout_s = observation_max_tokens, float(execute_timeout_s)
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
        self._memory_limit_mb = memory_limit_mb
        self._sandbox_minimum = sandbox_minimum
        self._level = ""
        self._no_bubblewrap = ""
        self._token_key = b""

    @classmethod
    def packages(cls, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the version of the engine that ``python`` has installed, if any."""
        site = Path(str(config.get("python"))).parent.parent / "lib"
        names = [
            info.name.removesuffix(".dist-info") for info in site.glob("python*/site-packages/appworld-*.dist-info")
        ]
        return {name: number for name, _, number in (text.partition("-") for text in names)}

    @classmethod
    def difficulties(cls, config: Mapping[str, Any], task_ids: Sequence[str]) -> dict[str, int]:
        """Return the difficulty of each task; {} if a task has none, as in the real test splits."""
        try:
            return {task: task_lists.difficulty_of(Path(config["root"]), task) for task in task_ids}
        except (FileNotFoundError, KeyError):
            return {}

    @classmethod
    def keeping_states(cls, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the options that make worlds leave their final states in ``folder``."""
        return {**config, "keep_experiments": True, "experiments_root": str(folder)}

    @classmethod
    def write_states(cls, config: Mapping[str, Any], runs: FinishedRuns, states: Path, folder: Path) -> list[str]:
        """Write one experiment per run in AppWorld's own layout; return the commands with which the engine grades them.

        Raises:
            EnvironmentFault: a state was not kept.
        """
        names = experiments.write_experiments(runs, states, Path(str(config["root"])), folder)
        return [f"appworld evaluate {name} {experiments.split_name(runs.split)} --root {folder}" for name in names]

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
        """Start the servers of worlds and of grades.

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
        grader = self._server("grader", self.run_folder.grader, {"memory_mb": GRADER_MEMORY_MB})
        results = await asyncio.gather(self._open_worlds(), self._start(grader), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result

    async def _open_worlds(self) -> None:
        self._token_key = await asyncio.to_thread(token_key, self.root)
        run = self.run_folder
        await asyncio.to_thread(run.show_task, self._first_task())
        prefix: list[str] = []
        try:
            prefix = await bubblewrap_prefix(self._python, run)
        except OSError as error:
            self._no_bubblewrap = str(error)
        settings = {
            "execute_timeout_s": self.execute_timeout_s,
            "paper_parity": self._paper_parity,
            "keep_logs": self._keep,
            "state_limit": STATE_LIMIT,
            "output_limit": OUTPUT_CHARACTERS_PER_TOKEN * self.observation_max_tokens,
            "sandbox": {"memory_mb": self._memory_limit_mb},
            "contained": bool(prefix),
        }
        ready = await self._start(self._server("world", run.agent, settings, prefix))
        self._check_level(ready)
        landlock = ready["landlock"]
        logger.info(
            "AppWorld pool is open: dataset %s, sandbox %s, %s%s",
            self.dataset,
            self._level,
            f"Landlock {landlock}" if landlock else "no Landlock: agent code can open no file at all",
            ", paper parity: agent code may import any module, and forge log-in tokens" if self._paper_parity else "",
        )

    def _check_level(self, ready: Mapping[str, Any]) -> None:
        """Raise PermissionError if the world server reports a weaker sandbox than the config demands, or interpreters
        that can read the dataset.
        """
        level = ready["level"]
        lacks = [] if level in ("seccomp", "bubblewrap") else [SECCOMP_MISSING]
        missing = "; ".join([*lacks, *filter(None, [self._no_bubblewrap])])
        if SANDBOX_LEVELS.index(level) < SANDBOX_LEVELS.index(self._sandbox_minimum):
            raise PermissionError(
                f"the strongest sandbox that works here is {level!r}, below sandbox_minimum {self._sandbox_minimum!r}: "
                f"{missing}; or lower sandbox_minimum"
            )
        tasks = (self.root / "data" / "tasks").resolve()  # where the ground truth is
        for folder in [] if lacks else ready["readable"]:
            if tasks.is_relative_to(Path(folder).resolve()):
                raise PermissionError(f"agent code may read {folder}: move the dataset elsewhere, it is at {self.root}")
        if level != self._level and level != "bubblewrap":
            logger.warning("agent code runs in sandbox %r: %s. %s", level, WITHSTANDS[level], missing)
        self._level = level

    async def bring_up(self, card: TaskCard, experiment: str) -> ForkedWorld:
        """Return a fresh world. At most two worlds per processor start at a time, whatever the number of slots."""
        await asyncio.to_thread(self.run_folder.show_task, card.task_id)
        async with self._starting:
            return await self._bring_up(card, experiment)

    async def _bring_up(self, card: TaskCard, experiment: str) -> ForkedWorld:
        secret = None if self._paper_parity else self._token_secret(card.task_id)
        request = {"task_id": card.task_id, "experiment": experiment, "token_secret": secret}
        process = await self._child("world")
        try:
            self._check_level(process.ready)  # its server may have taken the place of one that died
            answer = await process.exchange_while_it_moves(request)
            if not answer["ok"]:
                raise EnvironmentCrashed(f"the interpreter died while it started: {answer['message']}")
        except BaseException as error:
            process.kill()
            if isinstance(error, ProcessEnded):
                raise EnvironmentCrashed(f"the world died while it started: {error}") from error
            raise
        return ForkedWorld(process, self.losses)

    def _token_secret(self, task_id: str) -> str:
        """Return the key that signs the log-in tokens in a task's worlds; the key is the same in every run."""
        return hmac.new(self._token_key, task_id.encode(), hashlib.sha256).hexdigest()

    def _server(self, role: str, root: Path, settings: Mapping[str, Any], prefix: Sequence[str] = ()) -> ForkServer:
        """Return the server of ``role``, "world" or "grader", with its data in ``root``; it is not started yet.

        Args:
            prefix: the words before the server's command (bubblewrap).
        """
        folder = self.run_folder.path
        command = [*prefix, self._python, str(WORKER_FOLDER / "serve.py"), role, str(folder)]
        config = {"warm_up_task": self._first_task(), "settings": {**settings, "root": str(root)}}
        return ForkServer(role, command, config, EnvironmentCrashed, environment_of(root), folder / f"{role}.log")

    async def _start(self, server: ForkServer) -> Mapping[str, Any]:
        """Start a server; return the report that it sends when it is ready."""
        self._servers[server.name] = server
        return await server.start()

    async def _child(self, role: str) -> ForkedProcess:
        """Return a new process of the server of ``role``; start the server again if it died."""
        if self._closing:
            raise EnvironmentCrashed("the pool is closed")
        return await self._servers[role].fork()

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
        """Return the grader's answer; ``ok`` is false if grading takes too long or ends the grader's processes."""
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
        """Wait until the grader server runs. The server goes on starting even if nobody waits for it any more.

        Raises:
            EnvironmentCrashed: it was late. The protocol's own deadline for grades would make the state ungradable.
            WorldLost: the server does not start.
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
        """Free the slot of a closed environment; the environment calls ``release`` once."""
        self._open.discard(environment)
        self._slots.give_back()
        if self._run_folder is not None:
            await asyncio.to_thread(self._run_folder.remove_experiment, experiment)

    def status(self) -> PoolStatus:
        """Return counters for the node's metrics page."""
        losses = dict(self.losses.counts)
        restarts = sum(server.restarts for server in self._servers.values())
        details = {"replays": self.replays, "sandbox": self._level}
        return PoolStatus(len(self._open), self._slots.waiting, restarts, details, losses)

    async def close(self) -> None:
        """End all worlds and servers, and remove the run folder. May be called twice."""
        self._closing = True
        self.losses.close()
        self._slots.close()
        for environment in list(self._open):
            await environment.close()
        for server in self._servers.values():
            await server.close()
        if self._run_folder is not None:
            await asyncio.to_thread(self._run_folder.remove)
