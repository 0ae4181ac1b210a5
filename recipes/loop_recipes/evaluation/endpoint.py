"""Evaluates any model behind an OpenAI-compatible chat endpoint, in the same worlds and under the same protocol.

A rollout node works in token ids; an endpoint takes and gives text. So here the episodes run in this process, on an
environment pool of its own, and what comes of them is a conversation without tokens: enough to score and to look at,
nothing that could be trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from agent_environments.protocol import (
    Environment,
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentTimeout,
    create_pool,
)
from loop_recipes.evaluation.collect import Cell, EvaluationTimeout, ResultStore
from loop_recipes.evaluation.config import EndpointConfig
from loop_recipes.evaluation.scores import TaskResult
from rollout_server.chat_tokens import ChatTokens
from rollout_server.collecting.episode import derive_seed
from rollout_server.config import ConfigError
from rollout_server.rollout import Rollout, Turn

GRADE_DEADLINE_S = 300.0
CLOSE_DEADLINE_S = 60.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_CONTEXT_FULL = re.compile(r"context.?length|maximum context|too many tokens", re.IGNORECASE)


class AttemptFailed(Exception):
    """No rollout came of an attempt; it may be repeated."""


class ContextFull(Exception):
    """The endpoint refused the conversation for its length."""


@dataclass(frozen=True)
class Reply:
    """One answer of the endpoint; tokens as it counts them, 0 where it does not say."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class EndpointEpisodes:
    """Plays episodes on a pool of this process's own; blocking outside, asynchronous inside.

    Args:
        environment: {"name", "config"} of the pool.
        model_dir: folder of the tokenizer by which observations are cut, the same for all policies compared.
        log_folder: gets ``collections/<id>.jsonl``, for rollout-viewer.
    """

    def __init__(self, environment: Mapping[str, Any], model_dir: str, log_folder: Path) -> None:
        tokens = ChatTokens(model_dir)
        self._runner = asyncio.Runner()
        self._logs = log_folder / "collections"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._pool: EnvironmentPool = create_pool(environment["name"], environment.get("config", {}), tokens.spans)
        try:
            self._runner.run(self._pool.open())
        except (OSError, EnvironmentFault) as error:
            self.close()
            raise ConfigError(f"the environment does not start: {error}") from error

    @property
    def dataset(self) -> str:
        return self._pool.dataset

    def tasks(self, split: str) -> list[str]:
        """Task ids of a split.

        Raises:
            UnknownTask: no such split.
        """
        return list(self._pool.tasks(split))

    def run_cells(
        self,
        endpoint: EndpointConfig,
        cells: Sequence[Cell],
        store: ResultStore,
        *,
        retries: int,
        deadline_s: float,
        on_result: Callable[[Cell, TaskResult], None] = lambda cell, result: None,
    ) -> None:
        """Fill the store with a result for every attempt of ``cells`` that it lacks.

        Raises:
            EvaluationTimeout: not done after ``deadline_s``.
        """
        self._runner.run(self._run_cells(endpoint, cells, store, retries, deadline_s, on_result))

    def close(self) -> None:
        """End the pool; may be called twice."""
        try:
            self._runner.run(self._pool.close())
        except RuntimeError:
            return  # the runner is closed, and so was the pool
        self._runner.close()

    async def _run_cells(
        self,
        endpoint: EndpointConfig,
        cells: Sequence[Cell],
        store: ResultStore,
        retries: int,
        deadline_s: float,
        on_result: Callable[[Cell, TaskResult], None],
    ) -> None:
        places = asyncio.Semaphore(endpoint.max_concurrent)
        timeout = aiohttp.ClientTimeout(total=endpoint.request_timeout_s)

        async def attempt(session: aiohttp.ClientSession, cell: Cell, task: str, run: int) -> None:
            async with places:
                result = await self._attempt(session, endpoint, cell, task, run, retries)
            store.add(cell, result)
            on_result(cell, result)

        try:
            async with (
                asyncio.timeout(deadline_s),
                aiohttp.ClientSession(headers=endpoint.headers(), timeout=timeout) as session,
                asyncio.TaskGroup() as group,
            ):
                for cell in cells:
                    for task, run in store.missing(cell):
                        group.create_task(attempt(session, cell, task, run))
        except TimeoutError:
            raise EvaluationTimeout(
                f"{endpoint.model} was not done within deadline_s; start the same evaluation again to go on"
            ) from None

    async def _attempt(
        self, session: aiohttp.ClientSession, endpoint: EndpointConfig, cell: Cell, task: str, run: int, retries: int
    ) -> TaskResult:
        failure = ""
        for number in range(retries + 1):
            episode = ChatEpisode(self._pool, session, endpoint, cell, task, run, number)
            try:
                rollout = await episode.play()
            except AttemptFailed as error:
                failure = str(error)
                continue
            with (self._logs / f"{cell.request.id}.jsonl").open("a") as file:
                file.write(rollout.to_json() + "\n")
            return replace(
                TaskResult.from_rollout(rollout),
                tokens=rollout.extra["tokens"],
                sampled_tokens=rollout.extra["completion_tokens"],
            )
        return TaskResult(task_id=task, run=run, failure=failure)


class ChatEpisode:
    """One attempt at one task."""

    def __init__(
        self,
        pool: EnvironmentPool,
        session: aiohttp.ClientSession,
        endpoint: EndpointConfig,
        cell: Cell,
        task: str,
        run: int,
        attempt: int,
    ) -> None:
        self._pool, self._session, self._endpoint = pool, session, endpoint
        self._request, self._task, self._run, self._number = cell.request, task, run, attempt
        self._limits = cell.request.limits
        self._rollout_id = f"{cell.request.id}/{task}/{run}.{attempt}"
        self._seed = derive_seed(cell.request.seed, task, run, attempt)
        self._messages: list[dict[str, str]] = []
        self._turns: list[Turn] = []
        self._replies: list[Reply] = []
        self._deadline = 0.0

    async def play(self) -> Rollout:
        """Play to the end and grade.

        Raises:
            AttemptFailed: nothing came of it.
        """
        environment: Environment | None = None
        try:
            environment = await self._pool.acquire(self._rollout_id)
            started_at, started = time.time(), time.monotonic()
            self._deadline = started + self._limits.episode_deadline_s
            end_reason = await self._converse(environment)
            async with asyncio.timeout(GRADE_DEADLINE_S):
                grade = await environment.grade()
        except EnvironmentFault as error:
            raise AttemptFailed(f"{error.reason}: {error}") from error
        except TimeoutError as error:
            raise AttemptFailed("environment_timeout: no start, or no grade, within its deadline") from error
        finally:
            if environment is not None:
                with contextlib.suppress(TimeoutError, EnvironmentFault):  # the pool ends what is left when it closes
                    async with asyncio.timeout(CLOSE_DEADLINE_S):
                        await environment.close()
        # Not validated: there are no tokens to check. A turn's span is empty.
        return Rollout(
            rollout_id=self._rollout_id,
            collection_id=self._request.id,
            task_id=self._task,
            index=self._run,
            attempt=self._number,
            seed=self._seed,
            dataset=self._pool.dataset,
            token_ids=[],
            mask=[],
            sampler_logprobs=[],
            turns=self._turns,
            messages=self._messages,
            reward=grade.reward,
            success=grade.success,
            requirements=[asdict(requirement) for requirement in grade.requirements],
            end_reason=end_reason,
            temperature=self._request.sampling.temperature,
            started_at=started_at,
            seconds=time.monotonic() - started,
            tampered=grade.tampered,
            extra={
                "endpoint": self._endpoint.url,
                "model": self._endpoint.model,
                "tokens": max((r.prompt_tokens + r.completion_tokens for r in self._replies), default=0),
                "completion_tokens": sum(reply.completion_tokens for reply in self._replies),
            },
        )

    async def _converse(self, environment: Environment) -> str:
        """Turns until the episode ends; returns the end reason."""
        async with asyncio.timeout_at(self._loop_deadline()):
            opening = await environment.start(self._task)
        self._messages = [asdict(message) for message in opening]
        while True:
            try:
                async with asyncio.timeout_at(self._loop_deadline()):
                    reply = await self._ask()
            except ContextFull as error:
                if not self._turns:
                    raise AttemptFailed(f"the endpoint refuses the prompt: {error}") from error
                return "context_limit"
            except TimeoutError:
                if not self._turns:
                    raise AttemptFailed("server_error: no answer before the episode's deadline") from None
                return "deadline"
            self._replies.append(reply)
            self._messages.append({"role": "assistant", "content": reply.text})
            asked, observation, done, failed = time.monotonic(), None, False, True
            try:
                async with asyncio.timeout_at(self._loop_deadline()):
                    result = await environment.step(reply.text)
                observation, done, failed = result.observation, result.done, result.failed
            except (TimeoutError, EnvironmentTimeout):
                return "deadline"
            finally:
                self._turns.append(
                    Turn(
                        start=0,
                        end=0,
                        policy_version=self._request.policy_version,
                        finish_reason=reply.finish_reason,
                        server=self._endpoint.model,
                        sampling_seconds=reply.seconds,
                        environment_seconds=time.monotonic() - asked,
                        failed=failed,
                    )
                )
            self._messages.append({"role": "user", "content": observation})
            if done:
                return "completed"
            if len(self._turns) == self._limits.max_turns:
                return "turn_limit"
            if reply.prompt_tokens + reply.completion_tokens >= self._limits.max_context:
                return "context_limit"

    async def _ask(self) -> Reply:
        """One completion; asked again, with growing pauses, while the service is busy or away.

        Raises:
            ContextFull: the conversation is too long.
            AttemptFailed: the endpoint refuses the request.
        """
        body = {
            "model": self._endpoint.model,
            "messages": self._messages,
            "temperature": self._request.sampling.temperature,
            "top_p": self._request.sampling.top_p,
            "max_tokens": self._limits.max_tokens_per_turn,
            "seed": derive_seed(self._seed, len(self._turns)),
        }
        if self._request.sampling.top_k != -1:
            body["top_k"] = self._request.sampling.top_k
        body = {key: value for key, value in (body | self._endpoint.request).items() if value is not None}
        url = f"{self._endpoint.url.rstrip('/')}/chat/completions"
        pause = FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            try:
                async with self._session.post(url, json=body) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        return _reply(await answer.json(content_type=None), time.monotonic() - started)
                    if answer.status not in (408, 409, 429) and answer.status < 500:
                        if _CONTEXT_FULL.search(text):
                            raise ContextFull(text[:200])
                        raise AttemptFailed(
                            f"server_error: {url} answers {answer.status}: {' '.join(text.split())[:200]}"
                        )
                    wait = _retry_after(answer.headers.get("Retry-After"), pause)
            except (aiohttp.ClientError, TimeoutError):
                wait = pause
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _loop_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._deadline - time.monotonic()


def _reply(data: Any, seconds: float) -> Reply:
    """Parse an answer.

    Raises:
        AttemptFailed: it is no chat completion.
    """
    try:
        choice = data["choices"][0]
        usage = data.get("usage") or {}
        return Reply(
            text=choice["message"].get("content") or "",
            finish_reason=str(choice.get("finish_reason")),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            seconds=seconds,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise AttemptFailed(f"server_error: the endpoint's answer is no chat completion: {error!r}") from error


def _retry_after(header: str | None, otherwise: float) -> float:
    """Seconds that a service asks to wait; its dates are not read."""
    try:
        return min(max(float(header or otherwise), 0.0), LONGEST_PAUSE_S)
    except ValueError:
        return otherwise
