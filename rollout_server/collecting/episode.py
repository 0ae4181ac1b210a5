"""One episode, token in and token out: prompt, sample, run, append, until it ends; then grade.

Sampled ids are appended as they came from the server. Only observations are encoded, so the sequence in the rollout is
the sequence that was served, token for token.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeVar

from agent_environments.protocol import (
    Environment,
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentTimeout,
    Grade,
)
from rollout_server.chat_tokens import ChatTokens
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collection_request import CollectionRequest
from rollout_server.inference.router import BadLogprob, DeadlinePassed, Generation, RequestRefused, ServerUnavailable
from rollout_server.metrics import NodeMetrics
from rollout_server.policies.store import UnknownPolicy
from rollout_server.rollout import Rollout, Turn

logger = logging.getLogger(__name__)

ACQUIRE_DEADLINE_S = 3600.0
GRADE_DEADLINE_S = 300.0
CLOSE_DEADLINE_S = 60.0

T = TypeVar("T")


class EpisodeFailed(Exception):
    """The attempt is worthless; ``reason`` is one of record.FAILURE_REASONS."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Generator(Protocol):
    """What an episode asks of the router."""

    async def generate(
        self,
        *,
        episode_id: str,
        token_ids: list[int],
        model: str,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        deadline: float,
    ) -> Generation: ...

    def release(self, episode_id: str) -> None: ...


class Policies(Protocol):
    """What an episode asks of the policy store."""

    def acquire(self, version: int) -> str: ...

    def release(self, version: int) -> None: ...

    def latest(self) -> int: ...


@dataclass(frozen=True)
class EpisodeServices:
    """What episodes share."""

    pool: EnvironmentPool
    tokens: ChatTokens
    router: Generator
    policies: Policies
    metrics: NodeMetrics


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2^31) that depends on every part."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


class Episode:
    """One attempt at one rollout.

    ``attempts_before`` makes a repeated attempt sample with other seeds. ``pinned_model`` is the name that the servers
    know the collection's version by, which whoever started the collection has acquired; None in mode "latest".
    """

    def __init__(
        self,
        key: EpisodeKey,
        attempts_before: int,
        request: CollectionRequest,
        pinned_model: str | None,
        services: EpisodeServices,
    ):
        self.key = key
        self.rollout_id = f"{request.id}/{key.task_id}/{key.index}.{key.attempt}"
        self.seed = derive_seed(request.seed, key.task_id, key.index, attempts_before)
        self._request = request
        self._pinned_model = pinned_model
        self._limits = request.limits
        self._services = services
        self._deadline = 0.0
        self._token_ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._turns: list[Turn] = []
        self._messages: list[dict[str, str]] = []

    @property
    def sampled_tokens(self) -> int:
        """Tokens of the turns that have ended; what an abort throws away."""
        return sum(turn.end - turn.start for turn in self._turns)

    async def run(self) -> Rollout:
        """Play the episode to its end and grade it.

        Raises:
            EpisodeFailed: nothing came of it; the attempt may be repeated.
        """
        environment: Environment | None = None
        try:
            async with asyncio.timeout(ACQUIRE_DEADLINE_S):
                environment = await self._services.pool.acquire(self.rollout_id)
            started_at, started = time.time(), time.monotonic()
            self._deadline = started + self._limits.episode_deadline_s
            end_reason = await self._play(environment)
            grade = await self._grade(environment)
        except EnvironmentFault as error:
            raise EpisodeFailed(error.reason, str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise EpisodeFailed("environment_timeout", "no environment, or no grade, within its deadline") from error
        except BadLogprob as error:
            raise EpisodeFailed("bad_logprob", str(error)) from error
        except (ServerUnavailable, RequestRefused, UnknownPolicy) as error:
            raise EpisodeFailed("server_error", str(error)) from error
        finally:
            self._services.router.release(self.rollout_id)
            if environment is not None:
                await self._close(environment)
        return self._rollout(end_reason, grade, started_at, time.monotonic() - started)

    async def _play(self, environment: Environment) -> str:
        """Turns until the episode ends; returns the end reason."""
        tokens, limits = self._services.tokens, self._limits
        try:
            opening = await self._in_time(environment.start(self.key.task_id))
        except TimeoutError:
            raise EpisodeFailed("environment_timeout", "the world did not start before the deadline") from None
        answered = time.monotonic()
        self._messages = [asdict(message) for message in opening]
        self._append(tokens.prompt(opening))
        if len(self._token_ids) >= limits.max_context:
            size = len(self._token_ids)
            raise EpisodeFailed(
                "environment_error", f"the prompt's {size} tokens fill max_context {limits.max_context}"
            )
        while True:
            try:
                action, closed = await self._sample(answered)
            except DeadlinePassed:
                if self._turns:
                    return "deadline"
                raise
            self._messages.append({"role": "assistant", "content": action})
            asked = time.monotonic()
            try:
                result = await self._in_time(environment.step(action))
            except (TimeoutError, EnvironmentTimeout):
                self._note_step(time.monotonic() - asked, failed=True)
                return "deadline"
            answered = time.monotonic()
            self._note_step(answered - asked, result.failed)
            self._messages.append({"role": "user", "content": result.observation})
            if result.done:
                return "completed"
            if len(self._turns) == limits.max_turns:
                return "turn_limit"
            continuation = tokens.continuation(result.observation, closed)
            if len(self._token_ids) + len(continuation) >= limits.max_context:
                return "context_limit"
            self._append(continuation)

    async def _sample(self, answered: float) -> tuple[str, bool]:
        """One turn: the action's text, and whether the policy closed its turn itself.

        ``answered`` is when the environment gave its last answer; what lies between is the node's own time.
        """
        request, services = self._request, self._services
        if self._pinned_model is not None:
            version, model = request.policy_version, self._pinned_model
        else:
            version = services.policies.latest()
            model = services.policies.acquire(version)
        try:
            generation = await services.router.generate(
                episode_id=self.rollout_id,
                token_ids=self._token_ids,
                model=model,
                max_tokens=min(self._limits.max_tokens_per_turn, self._limits.max_context - len(self._token_ids)),
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                top_k=request.sampling.top_k,
                seed=derive_seed(self.seed, len(self._turns)),
                stop_token_ids=services.tokens.stop_ids,
                deadline=self._deadline,
            )
        finally:
            if self._pinned_model is None:
                services.policies.release(version)
        start = len(self._token_ids)
        self._token_ids += generation.token_ids
        self._mask += [True] * len(generation.token_ids)
        self._logprobs += generation.logprobs
        self._turns.append(
            Turn(
                start=start,
                end=len(self._token_ids),
                policy_version=version,
                finish_reason=generation.finish_reason,
                server=generation.server,
                sampling_seconds=generation.seconds,
                environment_seconds=0.0,
                cached_tokens=generation.cached_tokens,
            )
        )
        last = generation.token_ids[-1]
        spoken = generation.token_ids[:-1] if last in services.tokens.stop_ids else generation.token_ids
        services.metrics.turn(len(generation.token_ids), start, generation.cached_tokens, generation.seconds)
        action = services.tokens.decode(spoken)
        services.metrics.phase("node", time.monotonic() - answered - generation.seconds)
        return action, last == services.tokens.im_end

    def _append(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)

    def _note_step(self, seconds: float, failed: bool) -> None:
        self._turns[-1] = replace(self._turns[-1], environment_seconds=seconds, failed=failed)
        self._services.metrics.phase("environment", seconds)

    async def _in_time(self, work: Awaitable[T]) -> T:
        async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
            return await work

    async def _grade(self, environment: Environment) -> Grade:
        before = time.monotonic()
        async with asyncio.timeout(GRADE_DEADLINE_S):
            grade = await environment.grade()
        self._services.metrics.phase("grade", time.monotonic() - before)
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
        try:
            return Rollout(
                rollout_id=self.rollout_id,
                collection_id=self._request.id,
                task_id=self.key.task_id,
                index=self.key.index,
                attempt=self.key.attempt,
                seed=self.seed,
                dataset=self._services.pool.dataset,
                token_ids=self._token_ids,
                mask=self._mask,
                sampler_logprobs=self._logprobs,
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
            ).validate()
        except ValueError as error:
            raise EpisodeFailed("environment_error", str(error)) from error
