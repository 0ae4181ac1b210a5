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
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_environments.lost_worlds import Loss, Losses, WorldLost, answered
from agent_environments.protocol import EnvironmentCrashed, PoolStatus, TokenSpans
from appworld_adapter.making import dataset_commands
from appworld_adapter.pool.base import DatasetPool
from appworld_adapter.pool.bubblewrap import bubblewrap_prefix
from appworld_adapter.pool.episode import Execution
from appworld_adapter.pool.run_folder import STATE_LIMIT
from appworld_adapter.pool.servers import ServerSpec
from appworld_adapter.prompt import TaskCard
from loop_plumbing.forked_process import ForkedProcess, ProcessEnded

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


def token_key(root: Path) -> bytes:
    """Return a secret key, the same in every run, that cannot confirm a guessed answer: a hash of all passwords.

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


class ForkedWorld:
    """A world process with its interpreter."""

    def __init__(self, process: ForkedProcess, losses: Losses) -> None:
        self._process = process
        self._losses = losses
        self._waits = True
        """True while the world waits for a program. Else it is at work, was cut short or is at its end."""
        process.ended.add_done_callback(self._ended)

    def _ended(self, ended: asyncio.Future[int | None]) -> None:
        if self._waits and not self._process.killed:  # between two programs no program is the cause
            self._losses.note(self)

    async def execute(self, code: str) -> Execution:
        self._waits = False
        try:
            answer = await answered(self._process.exchange({"code": code}), "the world was lost")
        except WorldLost as lost:
            if lost.loss is Loss.ENDED:
                return Execution(None, completed=False, unsaved=str(lost))
            raise
        if answer["ok"]:
            self._waits = True
            return Execution(answer["output"], answer["completed"])
        # All interpreters die at once when the server does, which no program causes.
        if not await self._process.has_server():
            raise WorldLost("the world server died", Loss.REFUSED)
        return Execution(None, completed=False, unsaved=_unsaved(answer))

    async def settle(self) -> str | None:
        answer = await answered(self._process.exchange({"end": True}), "the world was lost")
        while "saved" not in answer:  # the answer to the program that came too late
            answer = await answered(self._process.answer(), "the world was lost")
        return _unsaved(answer)

    async def give_back(self, usable: bool) -> None:
        self._process.kill()


def _unsaved(answer: dict[str, Any]) -> str | None:
    """Return why a world could not save its last state; raises WorldLost where the disk is full."""
    if answer["saved"]:
        return None
    if answer.get("no_room"):
        raise WorldLost(answer["message"], Loss.NO_ROOM)
    return str(answer["message"])


class AppWorldPool(DatasetPool):
    """Worlds in sealed processes of their own, forked in a fraction of a second.

    Args:
        memory_limit_mb: memory that the interpreter, and the world it acts on, may each allocate after their start.
        sandbox_minimum: refuse to run below this level (agent_environments/sandbox). The pool uses the strongest level
            that works.
        options: see :class:`DatasetPool`.
    """

    def __init__(
        self,
        token_spans: TokenSpans,
        memory_limit_mb: int = 1024,
        sandbox_minimum: str = "seccomp",
        **options: Any,
    ) -> None:
        if sandbox_minimum not in SANDBOX_LEVELS:
            raise ValueError(f"sandbox_minimum is {sandbox_minimum!r}; levels are {', '.join(SANDBOX_LEVELS)}")
        super().__init__(token_spans, **options)
        self._memory_limit_mb = memory_limit_mb
        self._sandbox_minimum = sandbox_minimum
        self._level = ""
        self._no_bubblewrap = ""
        self._token_key = b""

    async def _open_worlds(self) -> None:
        self._token_key = await asyncio.to_thread(token_key, self.root)
        ready = await self._open_server("world")
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

    async def _server_spec(self, role: str) -> ServerSpec:
        if role != "world":
            return await super()._server_spec(role)
        run = self.run_folder
        await asyncio.to_thread(run.show_task, self._first_task())
        prefix: list[str] = []
        try:
            prefix = await bubblewrap_prefix(self._python, run)
        except OSError as error:
            self._no_bubblewrap = str(error)
        settings = {
            "execute_timeout_s": self.rules.execute_timeout_s,
            "paper_parity": self._paper_parity,
            "keep_logs": self._keep,
            "state_limit": STATE_LIMIT,
            "output_limit": OUTPUT_CHARACTERS_PER_TOKEN * self.rules.observation_max_tokens,
            "sandbox": {"memory_mb": self._memory_limit_mb},
            "contained": bool(prefix),
        }
        return ServerSpec(role, self._python, run.path, run.agent, self._first_task(), settings, prefix)

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
        """Return the key for the log-in tokens of a task's worlds: the same in every run."""
        return hmac.new(self._token_key, task_id.encode(), hashlib.sha256).hexdigest()

    def status(self) -> PoolStatus:
        status = super().status()
        return replace(status, details={**status.details, "sandbox": self._level})
