"""Episodes at the end of a line and their pool: deadlines, and bringing back a world whose line was lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agent_environments.lost_worlds import CommandsDoing, Loss, Losses, Recovery, WorldLost
from agent_environments.observation import FAILURE_HEAD, truncate
from agent_environments.protocol import (
    Broke,
    EnvironmentCrashed,
    EnvironmentTimeout,
    Grade,
    Message,
    PoolStatus,
    Requirement,
    StepResult,
    TokenSpans,
    ToolUse,
    UnknownTask,
    tasks_of_split,
)
from agent_environments.remote.line import LineStuck, RequestFailed, WorldLine
from agent_environments.slots import Slots
from loop_plumbing.agent_timeout import paused_agent_timeout
from loop_plumbing.breakage import raised_as
from loop_plumbing.sanitize import printable

logger = logging.getLogger(__name__)

GRADE_PATIENCE_S = 900.0
"""Seconds for a grade and the step before it: less than the protocol's deadline for grades, after which a state is
ungradable, because a machine that gives no grade is not the state's fault."""
CLOSE_TIMEOUT_S = 120.0
STEP_BROKE = FAILURE_HEAD + " The world broke while it ran this command. The episode is over."

_numbers = itertools.count(1)


class RemoteEnvironment:
    """An episode in a world on the other side of a line.

    If the line is lost, the episode runs its commands again on a new line and must get the same observations.
    :mod:`agent_environments.lost_worlds` says which losses count against a command. An agent cannot undo its actions:
    a command that loses too many worlds, or that takes too long, ends the episode. A state that is lost for good is
    ungradable.
    """

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool
        self._number = next(_numbers)
        self._line: WorldLine | None = None
        self._task_id: str | None = None
        self._opening = b""
        self._history: list[tuple[str, bytes]] = []
        """Commands with the digests of their answers."""
        self._over = False
        self._ungradable: str | None = None
        self._recovery = Recovery(pool.losses, self, self._pool.start_timeout_s)
        """The recovery of the current, or the last, request."""
        self._running: asyncio.Task[StepResult] | None = None
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Start the episode; raises UnknownTask, or EnvironmentCrashed if the other side cannot start the task."""
        self._pool.check_tasks([task_id])
        self._task_id = task_id
        with raised_as(EnvironmentCrashed, f"the world cannot start {task_id}: ", CommandsDoing, RequestFailed):
            opening = await self._recovering().run(self._start_on_a_line)
        self._opening = _digest(opening)
        return self._pool.opening(opening)

    def _recovering(self) -> Recovery:
        self._recovery = Recovery(self._pool.losses, self, self._pool.start_timeout_s)
        return self._recovery

    async def _start_on_a_line(self) -> dict[str, Any]:
        """Start on a new line. A world lost during the start counts as refused, as it holds nothing of the episode."""
        await self._leave()
        self._line = await self._pool.lease()
        try:
            return await self._line.call(
                self._pool.start_timeout_s, "start", episode=self._number, task=str(self._task_id)
            )
        except LineStuck as error:
            raise WorldLost(str(error), Loss.REFUSED) from error
        except WorldLost as lost:
            if lost.loss is Loss.GONE:
                raise
            raise WorldLost(str(lost), Loss.REFUSED) from lost

    async def step(self, action: str) -> StepResult:
        """Run the command in the agent's message.

        Raises:
            EnvironmentTimeout: the command took too long; the episode is over.
            EnvironmentCrashed: the worlds died by no fault of this episode.
        """
        if self._task_id is None or self._over:
            raise EnvironmentCrashed("this episode has no world: it was not started, or has ended")
        command = self._pool.command(action)
        if command is None:
            return StepResult(self._pool.no_command, done=False, failed=False, empty_action=True)
        self._running = asyncio.create_task(self._step(command))
        return await asyncio.shield(self._running)  # cancelled or not, the step runs to its end and is graded

    async def _step(self, command: str) -> StepResult:
        try:
            answer = await self._ask(self._pool.step_timeout_s, "step", command=command)
        except LineStuck as error:
            self._end(f"the last command was cut short, and its world with it: {error}")
            raise EnvironmentTimeout(str(error)) from error
        except CommandsDoing as error:
            self._end(str(error))
            return StepResult(STEP_BROKE, done=True, failed=True)
        except RequestFailed as error:
            self._over = True
            logger.warning("%s: the world broke in a step, which ends the episode: %s", self._task_id, error)
            return StepResult(STEP_BROKE, done=True, failed=True, broke=Broke("step", str(error)))
        self._history.append((command, _digest(answer)))
        self._over = answer["done"]
        if answer.get("reason") == EnvironmentTimeout.reason:
            raise EnvironmentTimeout(answer["observation"])
        empty = answer.get("empty_action", False)
        text, reminder = answer["observation"], answer.get("reminder", "")
        output = text.removesuffix(reminder)
        ending = text[len(output) :]  # "" where it does not end so
        observation = self._pool.observation_text(output) + ending
        return StepResult(
            observation,
            answer["done"],
            failed=answer["failed"],
            empty_action=empty,
            reminder=ending,
            reward=answer.get("turn_reward"),
        )

    def _end(self, ungradable: str) -> None:
        self._over, self._ungradable = True, ungradable

    async def _ask(self, deadline_s: float, op: str, **fields: Any) -> dict[str, Any]:
        """Return the answer of the episode's world; bring the world back first if it is lost.

        Raises:
            RequestFailed, LineStuck: the world refused the request, or did not answer in time.
            CommandsDoing: this request lost too many worlds, or the replay of a lost world differed.
            EnvironmentCrashed: the same happened, but not through this episode.
        """
        recovery = self._recovering()

        async def once() -> dict[str, Any]:
            if self._line is None or not self._line.alive:
                with paused_agent_timeout():
                    await self._bring_back()
            try:
                return await self._leased.call(deadline_s, op, episode=self._number, **fields)
            except LineStuck as error:
                if await self._pool.answers():
                    raise
                raise WorldLost(f"{error}, nor is anything else answered", Loss.CUT) from error

        try:
            return await recovery.run(once)
        except RequestFailed as error:
            if error.reason == EnvironmentCrashed.reason:
                raise EnvironmentCrashed(str(error)) from error
            raise
        except _Diverged as error:
            if recovery.suspect:
                raise CommandsDoing(f"a world was lost over this command, and {error}") from error
            raise EnvironmentCrashed(f"a world was lost, and {error}") from error

    async def _bring_back(self) -> None:
        """Repeat the episode's commands so far on another line."""
        logger.warning("the world of %s ended; replaying %d commands in another", self._task_id, len(self._history))
        self._pool.replays += 1
        try:
            same = _digest(await self._start_on_a_line()) == self._opening
            for command, answer in self._history:
                if not same:
                    break
                replayed = await self._leased.call(
                    self._pool.step_timeout_s, "step", episode=self._number, command=command
                )
                same = _digest(replayed) == answer
        except (RequestFailed, LineStuck) as error:
            if isinstance(error, RequestFailed) and error.reason == EnvironmentCrashed.reason:
                raise WorldLost(str(error), Loss.REFUSED) from error
            # the lost world had survived this command
            raise _Diverged(f"the world fails in the replay: {error}") from error
        if not same:
            raise _Diverged("its world answers differently in the replay")

    @property
    def _leased(self) -> WorldLine:
        if self._line is None:
            raise WorldLost("the episode has no line", Loss.GONE)
        return self._line

    async def grade(self) -> Grade:
        """Return the world's own score of the state reached so far.

        Raises:
            EnvironmentCrashed: the episode was never started, or its world was lost by no fault of the agent.
        """
        if self._task_id is None:
            raise EnvironmentCrashed("nothing to grade: the episode was never started")
        try:
            async with asyncio.timeout(GRADE_PATIENCE_S):
                await self._last_step()
                if self._ungradable is None:
                    return _grade(await self._ask(self._pool.step_timeout_s, "grade"))
        except (RequestFailed, LineStuck, CommandsDoing) as error:
            self._end(f"no grade: {error}")
        except TimeoutError as error:
            if self._recovery.under_way and not self._recovery.suspect:
                raise EnvironmentCrashed(f"its world was not brought back within {GRADE_PATIENCE_S:g} s") from error
            self._end(f"no grade within {GRADE_PATIENCE_S:g} s")
        return Grade.of_ungradable(self._ungradable or "no grade")

    async def _last_step(self) -> None:
        """Wait until the last step has ended; raise its EnvironmentCrashed, which a cancelled caller did not see."""
        if self._running is None:
            return
        await asyncio.wait([self._running])
        if not self._running.cancelled() and isinstance(error := self._running.exception(), EnvironmentCrashed):
            raise error

    async def _leave(self) -> None:
        if self._line is not None:
            line, self._line = self._line, None
            await self._pool.give_back(line)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        try:
            if self._line is not None and self._line.alive:
                with contextlib.suppress(WorldLost, LineStuck, RequestFailed):
                    await self._line.call(CLOSE_TIMEOUT_S, "close", episode=self._number)
        finally:
            await self._leave()
            self._pool.release(self)


def _digest(answer: dict[str, Any]) -> bytes:
    """Return a digest of an answer, for comparing answers without keeping them: an answer may take megabytes."""
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).digest()


def _grade(answer: dict[str, Any]) -> Grade:
    """Return a world's grade; :func:`~agent_environments.plain_values.plain_grade` checks the values later."""
    broke = answer.get("broke")
    return Grade(
        float(answer["reward"]),
        bool(answer["success"]),
        tuple(Requirement(**requirement) for requirement in answer.get("requirements", ())),
        answer.get("ungradable"),
        broke=None if broke is None else Broke(**broke),
        tools=tuple(ToolUse(**use) for use in answer.get("tools", ())),
        rewards=answer.get("rewards", {}),
        metrics=answer.get("metrics", {}),
    )


class _Diverged(Exception):
    """The replayed episode differs from the lost one."""


class RemotePool:
    """Lend remote episodes, first come, first served. Subclasses say where the episodes are played.

    Args:
        dataset: the name printed with every score.
        token_spans: the policy's tokenizer, for cutting observations.
        max_worlds: the largest number of episodes at a time.
        observation_max_tokens: an observation is cut to this many tokens.
        step_timeout_s: seconds for one command, and for a grade.
        start_timeout_s: seconds for the other side and its task to start, and for a lost world to come back.
    """

    no_command = "There is no command in this message."
    """The observation after a message without a command."""

    def __init__(
        self,
        dataset: str,
        token_spans: TokenSpans,
        max_worlds: int,
        observation_max_tokens: int,
        step_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        if max_worlds < 1 or observation_max_tokens < 1 or min(step_timeout_s, start_timeout_s) <= 0:
            raise ValueError("max_worlds and observation_max_tokens must be at least 1, time-outs above 0")
        self.dataset = dataset
        self.token_spans, self.observation_max_tokens = token_spans, observation_max_tokens
        self.step_timeout_s, self.start_timeout_s = float(step_timeout_s), float(start_timeout_s)
        self.replays = 0
        self.losses = Losses()
        self._slots = Slots(max_worlds)
        self._splits: Mapping[str, list[str]] = {}
        self._known: frozenset[str] = frozenset()
        self._open: set[RemoteEnvironment] = set()
        self._restarts = 0
        self._closing = False

    async def open(self) -> None:
        """Connect to the other side and read its tasks (:meth:`_know`)."""
        raise NotImplementedError

    async def lease(self) -> WorldLine:
        """Return a line to a place that has room for an episode; raises WorldLost (``REFUSED``) if all are full."""
        raise NotImplementedError

    async def give_back(self, line: WorldLine) -> None:
        """Free the place on this line of an episode that has left it."""
        raise NotImplementedError

    async def answers(self) -> bool:
        """Return whether the other side answers any request; called if a command got no answer in time."""
        return True

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        """Return the messages that open an episode, taken from the answer to the request "start"."""
        raise NotImplementedError

    def command(self, message: str) -> str | None:
        """Return the command in an assistant message; None if the message holds no command, and the observation is
        :attr:`no_command`."""
        raise NotImplementedError

    def observation_text(self, observation: str) -> str:
        """Return the text that the agent reads for an observation in the answer to a "step"."""
        return truncate(printable(observation), self.observation_max_tokens, self.token_spans)

    async def _close_lines(self) -> None:
        """Cut the lines to all places."""
        raise NotImplementedError

    def _know(self, splits: Mapping[str, list[str]]) -> None:
        self._splits = splits
        self._known = frozenset(task for tasks in splits.values() for task in tasks)

    def tasks(self, split: str) -> list[str]:
        return tasks_of_split(self._splits, split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            if task_id not in self._known:
                raise UnknownTask(f"no task {task_id!r} in dataset {self.dataset}")

    async def acquire(self, episode_id: str) -> RemoteEnvironment:
        await self._slots.take()
        environment = self._environment()
        self._open.add(environment)
        return environment

    def _environment(self) -> RemoteEnvironment:
        """Return an episode that nobody has started yet."""
        return RemoteEnvironment(self)

    def release(self, environment: RemoteEnvironment) -> None:
        """Free the slot of a closed environment; the environment calls ``release`` once."""
        self._open.discard(environment)
        self._slots.give_back()

    def status(self) -> PoolStatus:
        """Return counters for the node's metrics page."""
        losses = dict(self.losses.counts)
        return PoolStatus(len(self._open), self._slots.waiting, self._restarts, self._details(), losses)

    def _details(self) -> dict[str, Any]:
        return {"replays": self.replays}

    async def close(self) -> None:
        """End all episodes and lines. May be called twice."""
        self._closing = True
        self.losses.close()
        self._slots.close()
        await self._close_lines()
        for environment in list(self._open):
            await environment.close()
