"""One episode: start a world, let the speaker and the environment take turns until it ends, grade, close.

A branch first replays, in its new world, the actions of the rollout that it goes on from.

This is the protocol of training, of a checkpoint's evaluation and of an endpoint's: they differ in the speaker alone.
Limits, deadlines, seeds, end reasons and the making of the :class:`~rollout_server.rollout.Rollout` are here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import TypeVar

from agent_environments.no_voiding import NoVoiding
from agent_environments.protocol import (
    Environment,
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentTimeout,
    Grade,
    Message,
    StepResult,
)
from rollout_server.branch import BranchStart
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.speaker import (
    BranchRefused,
    ContextFull,
    EpisodeFailed,
    OutOfTime,
    Speaker,
    SpokenTurn,
)
from rollout_server.collection_request import CollectionRequest
from rollout_server.ids import rollout_id
from rollout_server.rollout import Rollout, Turn

logger = logging.getLogger(__name__)

ACQUIRE_DEADLINE_S = 3600.0
CLOSE_DEADLINE_S = 60.0
SHOWN_CHARACTERS = 60

T = TypeVar("T")


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2^31) that depends on every part."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


class Episode:
    """One attempt at one rollout.

    Args:
        draw: part of the seed. An attempt that is repeated has the same one (:meth:`Collector.draw`).
        request: the collection's limits, seed and way of sampling.
        on_phase: told the seconds spent in a phase: "environment", "grade", or "node" (our own work between the
            environment's answer and the agent's next turn).
        start: the point of a stored rollout that the episode goes on from; None for the task's opening.
    """

    def __init__(
        self,
        key: EpisodeKey,
        draw: int,
        request: CollectionRequest,
        pool: EnvironmentPool,
        speaker: Speaker,
        on_phase: Callable[[str, float], None] = lambda phase, seconds: None,
        start: BranchStart | None = None,
    ):
        self.key = key
        self.rollout_id = rollout_id(request.id, key.task_id, key.index, key.attempt)
        # The origin is part of a branch's seed, so that it never repeats what that rollout itself drew there.
        origin = [] if start is None else [start.origin.rollout_id, start.origin.turns]
        self.seed = derive_seed(request.seed, key.task_id, key.index, draw, *origin)
        self._start = start
        self._turns_before = 0 if start is None else start.origin.turns
        self._request = request
        self._limits = request.limits
        self._pool = pool
        self._speaker = speaker
        self._on_phase = on_phase
        self._deadline = 0.0
        self._turns: list[Turn] = []
        self._messages: list[dict[str, str]] = []

    @property
    def sampled_tokens(self) -> int:
        """Tokens of the turns that have ended; what an abort throws away."""
        return self._speaker.sampled_tokens

    async def run(self) -> list[Rollout]:
        """Play the episode to its end and grade it; returns its sequences.

        Raises:
            EpisodeFailed: nothing came of it; the attempt may be repeated.
        """
        environment: Environment | None = None
        try:
            environment = await self._acquire()
            started_at, started = time.time(), time.monotonic()
            self._deadline = started + self._limits.episode_deadline_s
            end_reason = await self._play(environment)
            grade = await self._grade(environment)
        except EpisodeFailed:
            raise
        except EnvironmentFault as error:
            raise EpisodeFailed(error.reason, str(error) or type(error).__name__) from error
        except Exception as error:
            logger.exception("%s failed in an unforeseen way", self.rollout_id)
            raise EpisodeFailed("environment_error", repr(error)) from error
        finally:
            self._speaker.close()
            if environment is not None:
                await self._close(environment)
        return [self._rollout(end_reason, grade, started_at, time.monotonic() - started)]

    async def _play(self, environment: Environment) -> str:
        """Turns until the episode ends; returns the end reason."""
        try:
            opening = await self._in_time(environment.start(self.key.task_id))
        except TimeoutError:
            raise EpisodeFailed("environment_timeout", "the world did not start before the deadline") from None
        # Without a turn there is nothing to judge the agent by: the attempt has failed, it is no short episode.
        try:
            return await self._converse(environment, opening)
        except ContextFull as error:
            if not self._turns:
                raise EpisodeFailed("environment_error", str(error)) from error
            return "context_limit"
        except OutOfTime as error:
            if not self._turns:
                raise EpisodeFailed("server_error", str(error)) from error
            return "deadline"

    async def _converse(self, environment: Environment, opening: Sequence[Message]) -> str:
        answered = time.monotonic()
        messages = list(opening)
        if self._start is not None:
            messages += await self._replay(environment, opening, self._start)
            answered = time.monotonic()
        self._messages = [asdict(message) for message in messages]
        self._speaker.begin(self.rollout_id, messages)
        while True:
            turn = self._turns_before + len(self._turns)
            spoken = await self._speaker.speak(derive_seed(self.seed, turn), self._deadline)
            self._on_phase("node", time.monotonic() - answered - spoken.seconds)
            self._messages.append({"role": "assistant", "content": spoken.text})
            asked = time.monotonic()
            try:
                result = await self._in_time(environment.step(spoken.text))
            except (TimeoutError, EnvironmentTimeout):
                self._note_turn(spoken, time.monotonic() - asked, failed=True)
                return "deadline"
            answered = time.monotonic()
            self._note_turn(spoken, answered - asked, result.failed)
            self._messages.append({"role": "user", "content": result.observation})
            if result.done:
                return "completed"
            if turn + 1 == self._request.max_turns(self.key.task_id):
                return "turn_limit"
            self._speaker.hear(result.observation)

    async def _replay(self, environment: Environment, opening: Sequence[Message], start: BranchStart) -> list[Message]:
        """Bring the world to where the stored rollout had it; returns the messages of the turns replayed.

        Raises:
            BranchRefused: the world answers otherwise than it did then.
        """
        if list(opening) != start.branch.opening:
            raise BranchRefused(f"the opening differs from that of {start.branch.rollout_id}")
        began, messages = time.monotonic(), []
        try:
            for turn, exchange in enumerate(start.exchanges):
                result = await self._in_time(environment.step(exchange.action))
                if result.done or result.observation != exchange.observation:
                    raise BranchRefused(_difference(start.branch.rollout_id, turn, exchange.observation, result))
                messages += [Message("assistant", exchange.action), Message("user", exchange.observation)]
        except TimeoutError:
            raise EpisodeFailed("environment_timeout", "the turns were not replayed before the deadline") from None
        finally:
            self._on_phase("environment", time.monotonic() - began)
        return messages

    def _note_turn(self, spoken: SpokenTurn, environment_seconds: float, failed: bool) -> None:
        self._turns.append(
            Turn(
                start=spoken.start,
                end=spoken.end,
                policy_version=spoken.policy_version,
                finish_reason=spoken.finish_reason,
                server=spoken.server,
                sampling_seconds=spoken.seconds,
                environment_seconds=environment_seconds,
                failed=failed,
                cached_tokens=spoken.cached_tokens,
            )
        )
        self._on_phase("environment", environment_seconds)

    async def _in_time(self, work: Awaitable[T]) -> T:
        async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
            return await work

    async def _acquire(self) -> Environment:
        try:
            async with asyncio.timeout(ACQUIRE_DEADLINE_S):
                return NoVoiding(await self._pool.acquire(self.rollout_id))
        except TimeoutError:
            message = f"no environment was free within {ACQUIRE_DEADLINE_S:g} s"
            raise EpisodeFailed("environment_timeout", message) from None

    async def _grade(self, environment: Environment) -> Grade:
        before = time.monotonic()
        grade = await environment.grade()
        self._on_phase("grade", time.monotonic() - before)
        return grade

    async def _close(self, environment: Environment) -> None:
        """Release the world whatever happens, to the end even when the episode is aborted meanwhile."""

        async def close() -> None:
            try:
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await environment.close()
            except Exception as error:  # the pool cleans up what it could not close
                logger.warning("%s: closing the environment failed: %r", self.rollout_id, error)

        closing = asyncio.ensure_future(close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    def _rollout(self, end_reason: str, grade: Grade, started_at: float, seconds: float) -> Rollout:
        spoken = self._speaker.record()
        try:
            return Rollout(
                rollout_id=self.rollout_id,
                collection_id=self._request.id,
                task_id=self.key.task_id,
                index=self.key.index,
                attempt=self.key.attempt,
                seed=self.seed,
                dataset=self._pool.dataset,
                token_ids=spoken.token_ids,
                mask=spoken.mask,
                sampler_logprobs=spoken.sampler_logprobs,
                turns=self._turns,
                messages=self._messages,
                reward=grade.reward,
                success=grade.success,
                requirements=[asdict(requirement) for requirement in grade.requirements],
                end_reason=end_reason,
                temperature=self._request.sampling.temperature,
                started_at=started_at,
                seconds=seconds,
                tampered=grade.tampered,
                ungradable=grade.ungradable,
                branch_of=self._start.origin if self._start is not None else None,
                extra=spoken.extra,
            ).validate()
        except ValueError as error:
            raise EpisodeFailed("environment_error", str(error)) from error


def _difference(rollout_id: str, turn: int, recorded: str, result: StepResult) -> str:
    """One line on what the world answered otherwise."""
    if result.observation == recorded:
        return f"turn {turn} of {rollout_id} now ends the episode"
    same = takewhile(lambda pair: pair[0] == pair[1], zip(recorded, result.observation, strict=False))
    at = sum(1 for _ in same)
    was, now = (repr(text[at : at + SHOWN_CHARACTERS]) for text in (recorded, result.observation))
    return f"turn {turn} of {rollout_id} is answered otherwise from character {at} on: {now}, recorded {was}"
