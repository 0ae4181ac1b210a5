"""The base of every way to play an episode: a world, a deadline, a grade, a record, and the cleaning up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from agent_environments.groups import grades_groups
from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.protocol import Broke, EnvironmentFault, EnvironmentPool, Grade, Member, Message, acquire
from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import rollout_id
from loop_formats.rollout import Rollout
from loop_plumbing.agent_timeout import AgentTimeout
from loop_plumbing.breakage import error_line
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.policy_client import EpisodeFailed

logger = logging.getLogger(__name__)

ACQUIRE_DEADLINE_S = 3600.0
START_DEADLINE_S = 3600.0
"""Last resort: the program that starts a world finds out for itself, and sooner, that it hangs."""
CLOSE_DEADLINE_S = 300.0


def derive_seed(*parts: object) -> int:
    """Return a seed in [0, 2^31) that depends on every one of ``parts``."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


def regraded(line: str, grade: Grade) -> Rollout:
    """Return the rollout in a JSON line, with the grade from its group's grading. Keeps an earlier ``broke``."""
    return Rollout.from_dict(_graded(json.loads(line), grade)).validate()


def _graded(fields: dict[str, Any], grade: Grade) -> dict[str, Any]:
    """Return a rollout's fields with its grade's fields added. Keeps figures stated before and an earlier ``broke``."""
    extra: dict[str, Any] = dict(fields.get("extra", {}))
    before: dict[str, dict[str, float]] = extra.pop("stated", {})
    stated = {kind: {**before.get(kind, {}), **getattr(grade, kind)} for kind in ("rewards", "metrics")}
    if any(stated.values()):
        extra["stated"] = {kind: dict(of) for kind, of in stated.items() if of}
    return {
        **fields,
        "reward": grade.reward,
        "success": grade.success,
        "requirements": [asdict(requirement) for requirement in grade.requirements],
        "ungradable": grade.ungradable,
        "broke": fields.get("broke") or (grade.broke and asdict(grade.broke)),
        "extra": extra,
    }


class Attempt(ABC):
    """An attempt at an episode; subclasses play it.

    Args:
        draw: part of the seed; a repeated attempt has the same ``draw`` (:meth:`Collector.draw`).
        request: the collection's limits, seed and way of sampling.
        on_phase: called with a phase and the seconds spent in it: "environment", "grade", or "node" (our own work
            between the environment's answer and the agent's next turn).
        origin: further parts of the seed.
    """

    def __init__(
        self,
        key: EpisodeKey,
        draw: int,
        request: CollectionRequest,
        pool: EnvironmentPool,
        on_phase: Callable[[str, float], None],
        origin: tuple[object, ...] = (),
    ):
        self.key = key
        self.rollout_id = rollout_id(request.id, key.task_id, key.index, key.attempt)
        self.seed = derive_seed(request.seed, key.task_id, key.index, draw, *origin)
        self._request = request
        self._limits = request.limits
        self._pool = pool
        self._on_phase = on_phase
        self._agent_timeout = AgentTimeout(self._limits.episode_deadline_s)
        self._broke: Broke | None = None
        self.group_input: Mapping[str, Any] | None = None
        """The input of the group's grader from this episode, once played, where its task grades episodes together; else
        None. Its rollouts have no reward until then (:func:`regraded`)."""

    @property
    @abstractmethod
    def sampled_tokens(self) -> int:
        """The number of tokens of the ended turns, which an abort discards."""

    @property
    @abstractmethod
    def turns(self) -> int:
        """The number of recorded turns of the policy."""

    @abstractmethod
    async def _play(self, environment: GuardedEnvironment) -> str:
        """Play from the start of the world to the end of the agent's last turn. Return the end reason."""

    @abstractmethod
    def _sequences(self) -> list[dict[str, Any]]:
        """Return, for each served sequence, the fields of a rollout that :meth:`_rollout` does not fill."""

    @abstractmethod
    async def _let_go(self) -> None:
        """Release the agent's resources once the episode is over, however it ended."""

    async def run(self) -> list[Rollout]:
        """Play the episode to its end, grade it, and return its sequences.

        This method decides whether an attempt may be repeated: only if the policy had no turn, or if the machine is
        known to have failed (EpisodeFailed, EnvironmentCrashed). The agent may have caused any other error: such an
        error ends the episode, which is graded in its present state.

        Raises:
            EpisodeFailed: the attempt has no result and may be repeated.
        """
        environment: GuardedEnvironment | None = None
        try:
            environment = await self._acquire()
            started_at, started = time.time(), time.monotonic()
            end_reason = await self._play_safely(environment)
            grade = await self._grade(environment)
        except EpisodeFailed:
            raise
        except EnvironmentFault as error:
            raise EpisodeFailed(error.reason, str(error) or type(error).__name__) from error
        except Exception as error:
            logger.exception("%s failed in an unforeseen way", self.rollout_id)
            raise EpisodeFailed("environment_error", error_line(error)) from error
        finally:
            try:
                await self._to_the_end(self._let_go)
            finally:
                if environment is not None:
                    await self._to_the_end(environment.close)
        seconds = time.monotonic() - started
        return [self._rollout(end_reason, grade, started_at, seconds, fields) for fields in self._sequences()]

    async def _play_safely(self, environment: GuardedEnvironment) -> str:
        """Run :meth:`_play`. An unforeseen error after the policy's first turn is not raised, but ends the episode."""
        try:
            return await self._play(environment)
        except (EpisodeFailed, EnvironmentFault):
            raise
        except Exception as error:
            if not self.turns:
                raise
            logger.exception("%s broke after a turn: it ends here, and is graded", self.rollout_id)
            self._broke = Broke("node", error_line(error))
            return "completed"

    async def _acquire(self) -> GuardedEnvironment:
        try:
            async with asyncio.timeout(ACQUIRE_DEADLINE_S):
                return GuardedEnvironment(await acquire(self._pool, self.rollout_id, self.key.task_id))
        except TimeoutError:
            message = f"no environment was free within {ACQUIRE_DEADLINE_S:g} s"
            raise EpisodeFailed("environment_timeout", message) from None

    async def _start_world(self, environment: GuardedEnvironment) -> list[Message]:
        """Start the episode's world, and return the messages that open the episode."""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                return await environment.start(self.key.task_id)
        except TimeoutError:
            message = f"the world did not start within {START_DEADLINE_S:g} s"
            raise EpisodeFailed("environment_timeout", message) from None

    async def _grade(self, environment: GuardedEnvironment) -> Grade:
        before = time.monotonic()
        in_group = grades_groups(self._pool, self.key.task_id)
        member = await environment.grade_member() if in_group else Member(await environment.grade())
        self._on_phase("grade", time.monotonic() - before)
        self.group_input = member.group_input
        return replace(member.grade, broke=self._broke or member.grade.broke)

    async def _to_the_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Run ``close`` to its end, even if the episode is aborted meanwhile. Logs errors and raises none of them."""

        async def closed() -> None:
            try:
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await close()
            except Exception as error:  # the pool cleans up worlds that it could not close
                logger.warning("%s: closing the episode failed: %r", self.rollout_id, error)

        closing = asyncio.ensure_future(closed())
        aborted: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                aborted = error
        if aborted is not None:
            raise aborted

    def _rollout(
        self, end_reason: str, grade: Grade, started_at: float, seconds: float, fields: dict[str, Any]
    ) -> Rollout:
        common: dict[str, Any] = {
            "rollout_id": self.rollout_id,
            "collection_id": self._request.id,
            "task_id": self.key.task_id,
            "index": self.key.index,
            "attempt": self.key.attempt,
            "seed": self.seed,
            "dataset": self._pool.dataset,
            "end_reason": end_reason,
            "temperature": self._request.sampling.temperature,
            "started_at": started_at,
            "seconds": seconds,
            "tools": [asdict(use) for use in grade.tools],
        }
        try:
            return Rollout(**_graded({**common, **fields}, grade)).validate()
        except ValueError as error:
            raise EpisodeFailed("environment_error", str(error)) from error
