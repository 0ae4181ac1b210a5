"""An AppWorld episode: deadlines, text, and bringing back a world that died."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agent_environments.extraction import extract_code
from agent_environments.lost_worlds import CommandsDoing, Loss, Losses, Recovery, WorldLost, answered
from agent_environments.observation import FAILURE_HEAD, observation, reminder_end
from agent_environments.protocol import (
    EnvironmentCrashed,
    EnvironmentTimeout,
    Grade,
    Message,
    StepResult,
    TokenSpans,
)
from appworld_adapter.pool.run_folder import experiment_name
from appworld_adapter.prompt import Prompt, TaskCard, task_lines
from loop_plumbing.agent_timeout import paused_agent_timeout
from loop_plumbing.breakage import raised_as
from loop_plumbing.forked_process import ForkedProcess

logger = logging.getLogger(__name__)

KILL_GRACE_S = 30.0
"""Seconds after the engine's own alarm at which a world is killed from outside: its interpreter has to answer the
alarm, and the world to save its state, on a machine that may be busy."""
PATIENCE_S = 300.0
"""Seconds of patience with a machine that loses worlds, or cannot start one, over one step."""
SETTLE_S = 120.0
"""Seconds that a world whose program was cut short has to save the program's changes; unsaved changes then count
against the agent."""
PROGRAM_BROKE = FAILURE_HEAD + " Traceback:\nThe interpreter ended while it ran this code. The episode is over."


@dataclass(frozen=True)
class Execution:
    """The outcome of a program: its ``output``, and whether the task is ``completed`` according to the databases.

    ``output`` is None if the program ended its interpreter or broke its world. The agent is held responsible, because
    we cannot tell an interpreter killed from within from one killed from outside. ``unsaved`` says why the saved state
    lacks some of the program's changes.
    """

    output: str | None
    completed: bool
    unsaved: str | None = None


class ForkedWorld:
    """A task's world, ready for programs: a world process with its interpreter."""

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
        """Run a program, without a deadline; raises WorldLost if the world is gone."""
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
        """Save the changes of a program that was cut short; no deadline. Return why saving failed, or None.

        Raises WorldLost if the world is gone, or the disk is full.
        """
        answer = await answered(self._process.exchange({"end": True}), "the world was lost")
        while "saved" not in answer:  # the answer to the program that came too late
            answer = await answered(self._process.answer(), "the world was lost")
        return _unsaved(answer)

    async def give_back(self) -> None:
        """End the world, by force if needed."""
        self._process.kill()


def _unsaved(answer: dict[str, Any]) -> str | None:
    """Return why a world could not save its last state, or None; raises WorldLost if the disk is full."""
    if answer["saved"]:
        return None
    if answer.get("no_room"):
        raise WorldLost(answer["message"], Loss.NO_ROOM)
    return str(answer["message"])


class AppWorldHost(Protocol):
    """The part of a pool's interface that an episode uses."""

    root: Path
    prompt: Prompt
    token_spans: TokenSpans
    observation_max_tokens: int
    execute_timeout_s: float
    losses: Losses
    replays: int

    def check_tasks(self, task_ids: list[str]) -> None: ...
    async def bring_up(self, card: TaskCard, experiment: str) -> ForkedWorld: ...
    async def grade(self, task_id: str, experiment: str) -> Grade: ...
    async def release(self, environment: AppWorldEnvironment, experiment: str) -> None: ...


class AppWorldEnvironment:
    """An episode. If its world is lost, all of the episode's code runs again in another world.

    :mod:`agent_environments.lost_worlds` says which losses count against a program. The agent cannot undo what it
    did: a program that ends its interpreter, or that a deadline cuts short, ends the episode and keeps its changes. If
    the changes cannot be saved, there is nothing to grade. If the machine cannot start another world (no memory, no
    room, a weaker sandbox), the attempt is repeated: worlds are bounded, so no agent causes this.
    """

    def __init__(self, pool: AppWorldHost, episode_id: str) -> None:
        self._pool = pool
        self._experiment = experiment_name(episode_id)
        self._known_card: TaskCard | None = None
        self._world: ForkedWorld | None = None
        self._cut_short: ForkedWorld | None = None
        """The world whose program was still running when its time was up, until it is settled."""
        self._unsaved: str | None = None
        """The reason why the saved state lacks some program's changes, so that it must not be graded."""
        self._recovery = Recovery(pool.losses, self._experiment, PATIENCE_S)
        """The recovery of the program that runs, or ran last."""
        self._lost: str | None = None
        """The reason why its world was lost, until another world has caught up."""
        self._started = False
        self._history: list[str] = []
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Start the episode; raises UnknownTask, or EnvironmentCrashed if no world can be started."""
        self._pool.check_tasks([task_id])
        with raised_as(EnvironmentCrashed, f"no world for {task_id}: ", OSError):
            self._known_card = await asyncio.to_thread(TaskCard.load, self._pool.root, task_id)
        with raised_as(EnvironmentCrashed, f"no world for {task_id}: ", CommandsDoing):
            await self._recovering().run(self._bring_up)
        self._started = True
        return self._pool.prompt.messages(self._card)

    @property
    def _card(self) -> TaskCard:
        if self._known_card is None:
            raise EnvironmentCrashed("the episode was never started")
        return self._known_card

    async def step(self, action: str) -> StepResult:
        """Run the action's code.

        Raises:
            EnvironmentTimeout: the code took too long; the episode is over and can be graded.
            EnvironmentCrashed: the world died, and no other could run the episode's code.
        """
        code = extract_code(action)
        execution = await self._execute_or_replay(code)
        self._history.append(code)
        self._unsaved = execution.unsaved
        output, done = execution.output, execution.completed
        if output is None:
            output, done = PROGRAM_BROKE, True
        if done:
            await self._leave()
        reminder = None if done else task_lines(self._card)
        text = observation(output, reminder, self._pool.observation_max_tokens, self._pool.token_spans)
        failed, end = output.startswith(FAILURE_HEAD), reminder_end(reminder)
        return StepResult(text, done, failed=failed, empty_action=not code, reminder=end)

    async def _execute_or_replay(self, code: str) -> Execution:
        """Run ``code``; if the world is lost, run all earlier code and then ``code`` in another world."""
        if self._world is None:
            raise EnvironmentCrashed("this episode has no world: it was not started, has ended or was killed")

        async def once() -> Execution:
            if self._world is None:
                with paused_agent_timeout():
                    await self._replay()
            return await self._execute(code)

        try:
            return await self._recovering().run(once)
        except CommandsDoing as error:
            logger.warning("%s: %s", self._card.task_id, error)
            self._lost = None
            return Execution(None, completed=False, unsaved=str(error))

    def _recovering(self) -> Recovery:
        self._recovery = Recovery(self._pool.losses, self._experiment, PATIENCE_S)
        return self._recovery

    async def _replay(self) -> None:
        """Run the episode's code so far in another world."""
        task, steps = self._card.task_id, len(self._history)
        logger.warning("world of %s died (%s); replaying %d steps in another", task, self._lost, steps)
        self._pool.replays += 1
        await self._bring_up()
        for earlier in self._history:
            if (await self._execute(earlier)).output is None:  # the lost interpreter had survived this code
                await self._lose(died := "the interpreter died in the replay")
                raise WorldLost(died, Loss.ENDED)
        self._lost = None

    async def _bring_up(self) -> None:
        try:
            self._world = await self._pool.bring_up(self._card, self._experiment)
        except PermissionError as error:
            raise EnvironmentCrashed(f"no world for {self._card.task_id}: {error}") from error
        except (EnvironmentCrashed, OSError) as error:
            raise WorldLost(f"no world for {self._card.task_id}: {error}", Loss.REFUSED) from error

    async def _execute(self, code: str) -> Execution:
        world = self._world
        if world is None:
            raise WorldLost("there is no world", Loss.GONE)
        seconds = self._pool.execute_timeout_s + KILL_GRACE_S
        try:
            async with asyncio.timeout(seconds):
                return await world.execute(code)
        except TimeoutError as error:
            self._cut_short, self._world = world, None
            raise EnvironmentTimeout(f"the world ran its code for {seconds:.0f} s and was stopped") from error
        except asyncio.CancelledError:
            self._cut_short, self._world = world, None
            raise
        except WorldLost as error:
            await self._lose(str(error))
            raise

    async def _lose(self, why: str) -> None:
        self._lost = why
        await self._leave()

    async def _settle(self) -> None:
        """Save the changes of a program that was cut short, so that a timeout undoes nothing.

        Raises:
            EnvironmentCrashed: the world's server is gone, or the disk is full.
        """
        if self._cut_short is None:
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                self._unsaved = await self._cut_short.settle()
        except TimeoutError:
            self._unsaved = f"its world did not save it within {SETTLE_S:.0f} s"
        except WorldLost as lost:
            if lost.loss in (Loss.REFUSED, Loss.NO_ROOM):
                raise EnvironmentCrashed(f"what the last step did could not be saved: {lost}") from lost
            self._unsaved = str(lost)
        await self._leave()

    async def _leave(self) -> None:
        worlds = [world for world in (self._world, self._cut_short) if world is not None]
        self._world = self._cut_short = None
        for world in worlds:
            await world.give_back()

    async def grade(self) -> Grade:
        """Grade the last saved state, if it is the episode's last state.

        Raises:
            EnvironmentCrashed: the episode was never started, its world was lost and not brought back, or the grader
                is gone.
        """
        if not self._started:
            raise EnvironmentCrashed("nothing to grade: the episode was never started")
        if self._lost is None:
            await self._settle()
        elif self._recovery.suspect:
            self._unsaved = f"its world was lost ({self._lost}) and not brought back in time"
        else:
            raise EnvironmentCrashed(f"its world was lost ({self._lost}) and not brought back in time")
        if self._unsaved is not None:
            return Grade.of_ungradable(f"what the last step did could not be saved: {self._unsaved}")
        return await self._pool.grade(self._card.task_id, self._experiment)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._leave()
            await self._pool.release(self, self._experiment)
