"""AppWorld behind the environment protocol: worlds forked from one warm process, and a grader apart from them.

Who runs where:

    this process ── world server (warm, forks) ──▶ world process (databases, APIs) ──▶ interpreter (agent code)
         └───────── grader server (warm, forks) ──▶ grade of one saved state; alone reads the ground truth

This file holds the episodes and their deadlines. It imports nothing of the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appworld_adapter import tasks as task_lists
from appworld_adapter.bubblewrap import bubblewrap_prefix
from appworld_adapter.environment import (
    EnvironmentCrashed,
    EnvironmentTimeout,
    Grade,
    Message,
    PoolStatus,
    Requirement,
    StepResult,
    TokenSpans,
)
from appworld_adapter.extraction import extract_code
from appworld_adapter.observation import FAILURE_HEAD, observation
from appworld_adapter.prompt import Prompt, TaskCard, task_lines
from appworld_adapter.run_folder import RunFolder
from appworld_adapter.servers import Connection, ForkServer, ServerSpec

logger = logging.getLogger(__name__)

START_WORLD_TIMEOUT_S = 120.0
GRADE_TIMEOUT_S = 120.0
KILL_GRACE_S = 5.0
"""How much later than the engine's own alarm the world is killed from outside."""
OUTPUT_CHARACTERS_PER_TOKEN = 64
"""Output is dropped, while it is produced, beyond this many characters per token that an observation may show."""
INTERPRETER_DIED = FAILURE_HEAD + " Traceback:\nThe interpreter ended while it ran this code. The episode is over."
SANDBOX_LEVELS = ("none", "rlimits", "seccomp", "bubblewrap")


class AppWorldEnvironment:
    """One episode. A world that dies is brought back once per step, by running the episode's code from the start."""

    def __init__(self, pool: AppWorldPool, episode_id: str) -> None:
        self._pool = pool
        # Slashes would make folders; and two attempts of one episode must not share one.
        self._experiment = f"{episode_id.replace('/', '-')[-80:]}-{secrets.token_hex(4)}"
        self._card: TaskCard | None = None
        self._reminder = ""
        self._connection: Connection | None = None
        self._history: list[str] = []
        self._deadline = 0.0
        self._ended = False
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Raises UnknownTask; EnvironmentCrashed or EnvironmentTimeout if no world can be had."""
        pool = self._pool
        pool.check_tasks([task_id])
        self._card = TaskCard.load(pool.root, task_id)
        self._reminder = task_lines(self._card)
        self._deadline = time.monotonic() + pool.episode_timeout_s
        await asyncio.to_thread(pool.run_folder.show_task, task_id)
        try:
            await self._bring_up()
        except EnvironmentCrashed as error:
            logger.warning("world of %s died while it started (%s); starting another", task_id, error)
            await self._bring_up()
        return pool.prompt.messages(self._card)

    async def step(self, action: str) -> StepResult:
        """Run the action's code.

        Raises:
            EnvironmentTimeout: the code, or the episode, took too long; the world is gone, its state can be graded.
            EnvironmentCrashed: the world died twice in this step.
        """
        code = extract_code(action)
        answer = await self._execute_or_replay(code)
        self._history.append(code)
        if answer["ok"]:
            output, done = answer["output"], answer["completed"]
        else:  # the interpreter died of this code, and of this code again in a fresh world: the agent's doing
            output, done = INTERPRETER_DIED, True
        if done:
            self._hang_up()
        self._ended = done
        pool = self._pool
        shown = observation(output, None if done else self._reminder, pool.observation_max_tokens, pool.token_spans)
        return StepResult(shown, done=done, failed=output.startswith(FAILURE_HEAD), empty_action=not code)

    async def _execute_or_replay(self, code: str) -> dict[str, Any]:
        try:
            answer = await self._execute(code)
            if answer["ok"]:
                return answer
            reason = answer["message"]
        except EnvironmentCrashed as error:
            reason = str(error)
        task_id = self._card.task_id if self._card else ""
        logger.warning("world of %s died (%s); replaying %d steps in another", task_id, reason, len(self._history))
        self._pool.replays += 1
        self._hang_up()
        await self._bring_up()
        for earlier in self._history:
            await self._execute(earlier)
        return await self._execute(code)

    async def _bring_up(self) -> None:
        pool = self._pool
        async with pool.starting:
            self._connection = await (await pool.world_server()).connect()
            request = {
                "task_id": self._card.task_id,
                "experiment": self._experiment,
                "token_secret": None if pool.paper_parity else pool.token_secret(self._card.task_id),
            }
            self._connection.pid = (await self._call(None, START_WORLD_TIMEOUT_S, "starting its world"))["pid"]
            await self._call(request, START_WORLD_TIMEOUT_S, "starting its world")

    async def _execute(self, code: str) -> dict[str, Any]:
        return await self._call({"code": code}, self._pool.execute_timeout_s + KILL_GRACE_S, "running its code")

    async def _call(self, request: dict[str, Any] | None, timeout_s: float, doing: str) -> dict[str, Any]:
        if self._connection is None:
            raise EnvironmentCrashed("this episode has no world any more")
        remaining = self._deadline - time.monotonic()
        try:
            return await self._connection.call(request, max(0.0, min(timeout_s, remaining)))
        except TimeoutError as error:
            self._hang_up()
            what = f"{timeout_s:.0f} s {doing}" if remaining > timeout_s else "its episode's time"
            raise EnvironmentTimeout(f"the world used up {what} and was killed") from error

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.kill()
            self._connection = None

    async def grade(self) -> Grade:
        """Grade the last saved state. Raises EnvironmentCrashed if there is none or the grader died twice."""
        if self._card is None:
            raise EnvironmentCrashed("nothing to grade: the episode was never started")
        return await self._pool.grade(self._card.task_id, self._experiment)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._hang_up()
        self._pool.release(self)
        await asyncio.to_thread(self._pool.run_folder.remove_experiment, self._experiment)


class AppWorldPool:
    """Lends :class:`AppWorldEnvironment`, at most ``max_worlds`` at a time, first come, first served.

    Args:
        token_spans: the policy's tokenizer, for cutting observations.
        python: interpreter of the AppWorld environment.
        root: folder that holds ``data/``.
        prompt: template in ``prompts/``.
        observation_max_tokens: an observation's output is cut to this many tokens.
        max_worlds: places; who asks while all are taken waits.
        execute_timeout_s: time for one action; the engine's alarm rings then, and soon after the world is killed.
        episode_timeout_s: time for a whole episode, from ``start`` on.
        memory_limit_mb: what the interpreter may allocate beyond what it starts with.
        sandbox_minimum: refuse to run below this level (see worker/sandbox.py). The strongest that works is used.
        paper_parity: the engine as the paper's authors ran it: any module may be imported, and log-in tokens are signed
            with the engine's published constant. The kernel's limits stay. Costs: see docs/environment.md.
        keep_experiments: leave the worlds' states and logs in ``experiments_root``.
        experiments_root: folder for states and sockets; None: a tmpfs where there is one.
    """

    def __init__(
        self,
        token_spans: TokenSpans,
        python: str,
        root: str,
        prompt: str = "loop",
        observation_max_tokens: int = 3000,
        max_worlds: int = 64,
        execute_timeout_s: float = 100.0,
        episode_timeout_s: float = 1800.0,
        memory_limit_mb: int = 1024,
        sandbox_minimum: str = "seccomp",
        paper_parity: bool = False,
        keep_experiments: bool = False,
        experiments_root: str | None = None,
    ) -> None:
        if sandbox_minimum not in SANDBOX_LEVELS:
            raise ValueError(f"sandbox_minimum is {sandbox_minimum!r}; levels are {', '.join(SANDBOX_LEVELS)}")
        if keep_experiments and experiments_root is None:
            raise ValueError("keep_experiments needs experiments_root, a folder to keep them in")
        if max_worlds < 1 or observation_max_tokens < 1 or execute_timeout_s < 1:
            raise ValueError("max_worlds, observation_max_tokens and execute_timeout_s must be at least 1")
        self.dataset = task_lists.dataset_name(root)
        self.token_spans = token_spans
        self.root = Path(root)
        self.prompt = Prompt(prompt)
        self.observation_max_tokens = observation_max_tokens
        self.execute_timeout_s = float(execute_timeout_s)
        self.episode_timeout_s = float(episode_timeout_s)
        self.paper_parity = paper_parity
        self.replays = 0
        self.starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._python = python
        self._memory_limit_mb = memory_limit_mb
        self._sandbox_minimum = sandbox_minimum
        self._keep = keep_experiments
        self._experiments_root = experiments_root
        self._places = asyncio.Semaphore(max_worlds)  # wakes its waiters first come, first served
        self._waiting = 0
        self._open: set[AppWorldEnvironment] = set()
        self._run_folder: RunFolder | None = None
        self._servers: dict[str, ForkServer] = {}
        self._server_locks = {"world": asyncio.Lock(), "grader": asyncio.Lock()}
        self._restarts = 0
        self._level = "none"
        self._closing = False

    @property
    def run_folder(self) -> RunFolder:
        if self._run_folder is None:
            raise EnvironmentCrashed("the pool is not open")
        return self._run_folder

    async def open(self) -> None:
        """Start both servers.

        Raises:
            FileNotFoundError: no AppWorld interpreter there.
            PermissionError: the sandbox is weaker than ``sandbox_minimum``.
            EnvironmentCrashed: a server did not start.
        """
        if not os.access(self._python, os.X_OK):
            raise FileNotFoundError(
                f"no AppWorld interpreter at {self._python}: run `make setup`, or set `python` to one that has appworld"
            )
        self._run_folder = RunFolder.create(self._experiments_root, self.root, self._keep)
        try:
            results = await asyncio.gather(*map(self._server, ("world", "grader")), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self.close()
            raise
        logger.info(
            "AppWorld pool is open: dataset %s, sandbox %s%s%s",
            self.dataset,
            self._level,
            "" if results[0].ready["landlock"] else " (no Landlock: agent code can open no file at all)",
            ", paper parity (any module may be imported)" if self.paper_parity else "",
        )

    async def _server(self, role: str) -> ForkServer:
        """The running server of ``role``, started again if it died."""
        async with self._server_locks[role]:
            server = self._servers.get(role)
            if server is not None and server.alive:
                return server
            if self._closing:
                raise EnvironmentCrashed("the pool is closed")
            if server is not None:
                logger.warning("the %s server died; starting another", role)
                self._restarts += 1
                await server.stop()
            server = self._servers[role] = await ForkServer.start(await self._server_spec(role))
            if role == "world":
                try:
                    self._check_level(server)
                except PermissionError:
                    await server.stop()
                    raise
            return server

    async def _server_spec(self, role: str) -> ServerSpec:
        run = self.run_folder
        first_task = next(path.name for path in sorted((self.root / "data" / "tasks").iterdir()) if path.is_dir())
        if role == "grader":
            return ServerSpec(role, self._python, run.path, run.grader, first_task, {})
        await asyncio.to_thread(run.show_task, first_task)
        settings = {
            "execute_timeout_s": self.execute_timeout_s,
            "paper_parity": self.paper_parity,
            "output_limit": OUTPUT_CHARACTERS_PER_TOKEN * self.observation_max_tokens,
            "sandbox": {"memory_mb": self._memory_limit_mb},
        }
        prefix = await bubblewrap_prefix(self._python, run.path, self.root)
        return ServerSpec(role, self._python, run.path, run.agent, first_task, settings, prefix)

    def _check_level(self, server: ForkServer) -> None:
        level = server.ready["level"]
        self._level = "bubblewrap" if server.contained and level == "seccomp" else level
        if SANDBOX_LEVELS.index(self._level) < SANDBOX_LEVELS.index(self._sandbox_minimum):
            raise PermissionError(
                f"the strongest sandbox that works here is {self._level!r}, below sandbox_minimum "
                f"{self._sandbox_minimum!r}: install bubblewrap or allow seccomp, or lower sandbox_minimum"
            )

    async def world_server(self) -> ForkServer:
        return await self._server("world")

    async def grade(self, task_id: str, experiment: str) -> Grade:
        """Have the saved state of ``experiment`` graded. A grader that dies is replaced, once."""
        if not (self.run_folder.experiment(experiment) / "tasks" / task_id / "dbs").exists():
            raise EnvironmentCrashed("nothing to grade: the world died before it had a state")
        request = {"task_id": task_id, "experiment": experiment}
        try:
            answer = await self._grade_once(request)
        except EnvironmentCrashed as error:
            logger.warning("the grader of %s died (%s); grading again", task_id, error)
            answer = await self._grade_once(request)
        if not answer["ok"]:
            raise EnvironmentCrashed(f"the state of {task_id} cannot be graded: {answer['message']}")
        requirements = tuple(
            Requirement(test["requirement"], passed, no_op_pass=test["label"] == "no_op_pass")
            for passed, tests in ((True, answer["passes"]), (False, answer["failures"]))
            for test in tests
        )
        return Grade(len(answer["passes"]) / answer["num_tests"], answer["success"], requirements)

    async def _grade_once(self, request: dict[str, Any]) -> dict[str, Any]:
        connection = await (await self._server("grader")).connect()
        try:
            connection.pid = (await connection.call(None, GRADE_TIMEOUT_S))["pid"]
            return await connection.call(request, GRADE_TIMEOUT_S)
        except TimeoutError as error:
            raise EnvironmentTimeout(f"grading {request['task_id']} took more than {GRADE_TIMEOUT_S:.0f} s") from error
        finally:
            connection.kill()

    def token_secret(self, task_id: str) -> str:
        """Key for the log-in tokens of a task's worlds: the same in every run, unknown without the ground truth."""
        digest = hashlib.sha256(b"log-in tokens of " + task_id.encode())
        for path in sorted((self.root / "data" / "tasks" / task_id / "ground_truth").glob("*.*")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def tasks(self, split: str) -> list[str]:
        return task_lists.load_split(self.root, split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        task_lists.check_tasks(self.root, task_ids)

    async def acquire(self, episode_id: str) -> AppWorldEnvironment:
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        if self._closing:
            self._places.release()
            raise EnvironmentCrashed("the pool is closed")
        environment = AppWorldEnvironment(self, episode_id)
        self._open.add(environment)
        return environment

    def release(self, environment: AppWorldEnvironment) -> None:
        """Called once by an environment that closes."""
        self._open.discard(environment)
        self._places.release()

    def status(self) -> PoolStatus:
        """Counters for the node's metrics page."""
        details = {"sandbox": self._level, "replays": self.replays}
        return PoolStatus(len(self._open), self._waiting, self._restarts, details)

    async def close(self) -> None:
        """End all worlds, both servers, and remove the run folder. May be called twice."""
        self._closing = True
        for environment in list(self._open):
            await environment.close()
        for server in self._servers.values():
            await server.stop()
        if self._run_folder is not None:
            await asyncio.to_thread(self._run_folder.remove)
