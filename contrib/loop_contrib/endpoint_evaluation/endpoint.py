"""Evaluates any model behind an OpenAI-compatible chat endpoint, in the same worlds and by the same episodes.

A rollout node works in token ids; an endpoint takes and gives text. So here the episodes run in this process, on a
separate environment pool. Their result is a conversation without tokens, which can be scored and read, but not trained
on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp

from agent_environments.description import description_of
from agent_environments.protocol import EnvironmentFault, EnvironmentPool, create_pool
from loop_contrib import chat_client
from loop_contrib.chat_client import ChatClient
from loop_contrib.endpoint_evaluation.endpoint_client import EndpointClient, check_reached
from loop_formats.collection_request import MAX_ATTEMPTS, failures_warning
from loop_formats.run_files import append_to, log_path, writing
from loop_formats.schema import ConfigError
from loop_plumbing import running_time
from loop_plumbing.retries import pauses
from loop_recipes.config.loop_config import EndpointConfig
from loop_recipes.evaluation.collect import Cell, EvaluationTimeout, NoScore, ResultStore
from loop_recipes.evaluation.scores import TaskResult
from model_families.chat import open_chat
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.episode import Episode
from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.config import EnvironmentConfig

logger = logging.getLogger(__name__)

NEVER_ANSWERED = (401, 403, 404)
"""Statuses of a wrong key, model or address: while there has been no completion, no other request will fare better."""


class EndpointEpisodes:
    """Plays episodes on a pool in this process. The methods block; inside, the episodes run asynchronously.

    Args:
        environment: config of the pool in which the episodes run.
        model_dir: folder of the tokenizer that cuts observations; use the same for all policies compared.
        log_folder: folder that gets ``collections/<id>.jsonl``, for `loop view`.
    """

    check_reached = staticmethod(check_reached)

    def __init__(self, environment: EnvironmentConfig, model_dir: str, log_folder: Path) -> None:
        tokens = open_chat(model_dir)
        self._logs = log_folder / "collections"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._pool: EnvironmentPool = create_pool(environment.name, environment.options, tokens.spans)
        self._runner = asyncio.Runner(loop_factory=running_time.event_loop)
        self._closed = False
        try:
            self._runner.run(self._pool.open())
        except (OSError, ValueError, EnvironmentFault) as error:
            self.close()
            raise ConfigError(f"the environment does not start: {error}") from error
        self.description = description_of(environment.name, self._pool)

    @property
    def dataset(self) -> str:
        return self._pool.dataset

    def tasks(self, split: str) -> list[str]:
        """Return the task ids of a split.

        Raises:
            UnknownTask: there is no such split.
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
        """Play every rollout of ``cells`` whose result the store lacks, and add the results to the store.

        As on a rollout node, a rollout has :data:`MAX_ATTEMPTS` attempts. At the end, lost rollouts are played again,
        ``retries`` times with one attempt each.

        Raises:
            NoScore: all rollouts of a cell were lost.
            EvaluationTimeout: some rollouts were not done after ``deadline_s``.
            ConfigError: the endpoint gives no completion at all.
        """
        self._finished = 0
        self._failures: Counter[str] = Counter()
        self._failures_by_task: Counter[str] = Counter()
        self._runner.run(self._run_cells(endpoint, cells, store, retries, deadline_s, on_result))
        if warning := failures_warning(self._finished, self._failures, self._failures_by_task):
            logger.warning("evaluation of %s: %s", endpoint.model, warning)

    def close(self) -> None:
        """Close the pool and all its worlds. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with self._runner:
            self._runner.run(self._pool.close())

    async def _run_cells(
        self,
        endpoint: EndpointConfig,
        cells: Sequence[Cell],
        store: ResultStore,
        retries: int,
        deadline_s: float,
        on_result: Callable[[Cell, TaskResult], None],
    ) -> None:
        episodes_at_once = asyncio.Semaphore(endpoint.max_concurrent)
        timeout = aiohttp.ClientTimeout(total=endpoint.request_timeout_s)

        rounds = [range(MAX_ATTEMPTS), *(range(n, n + 1) for n in range(MAX_ATTEMPTS, MAX_ATTEMPTS + retries))]

        async def fill(client: ChatClient, cell: Cell, task: str, run: int, attempts: range) -> None:
            async with episodes_at_once:
                result = await self._result(client, endpoint, cell, task, run, attempts)
            if not result.lost or attempts == rounds[-1]:
                store.add(cell, result)
                on_result(cell, result)
            lost[cell.request.id] = f"{task}, run {run}: {result.failure}"

        try:
            async with (
                asyncio.timeout(deadline_s),
                aiohttp.ClientSession(headers=endpoint.headers(), timeout=timeout) as session,
            ):
                client = ChatClient(session, endpoint.url)
                for attempts in rounds:
                    lost: dict[str, str] = {}
                    async with asyncio.TaskGroup() as group:
                        for cell in cells:
                            for task, run in store.missing(cell):
                                group.create_task(fill(client, cell, task, run, attempts))
                    for cell in cells:
                        if not any(not result.lost for result in store.results(cell)):
                            raise NoScore.of(
                                cell, f"all {len(cell.expected)} rollouts lost, such as {lost[cell.request.id]}"
                            )
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except TimeoutError:
            raise EvaluationTimeout(
                f"{endpoint.model} was not done within deadline_s; start the same evaluation again to go on"
            ) from None

    async def _result(
        self, client: ChatClient, endpoint: EndpointConfig, cell: Cell, task: str, run: int, attempts: range
    ) -> TaskResult:
        """Return the result of the first attempt that has one, or else a lost result that says why all failed.

        Raises:
            ConfigError: the endpoint has never given a completion and is not expected to give one.
        """
        failure = ""
        for attempt, pause_s in zip(attempts, pauses(chat_client.FIRST_PAUSE_S), strict=False):
            policy_client = EndpointClient(client, endpoint, cell.request)
            episode = Episode(EpisodeKey(task, run, attempt), 0, cell.request, self._pool, policy_client)
            try:
                sequences = await episode.run()
            except EpisodeFailed as error:
                failure = f"{error.reason}: {error}"
                self._failures[error.reason] += 1
                self._failures_by_task[task] += 1
                last = attempt == attempts[-1]
                refused = policy_client.refusal is not None and (last or policy_client.refusal.status in NEVER_ANSWERED)
                if refused and not client.completions:
                    cure = "correct endpoint.url, endpoint.model, or the key in endpoint.api_key_env"
                    raise ConfigError(f"{endpoint.model} gave no completion: {error}; {cure}") from error
                if not last:
                    await asyncio.sleep(pause_s)
                continue
            self._finished += 1
            log = log_path(self._logs, cell.request.id)
            with writing(log), append_to(log) as file:
                file.writelines(rollout.to_json() + "\n" for rollout in sequences)
            return replace(
                TaskResult.from_rollout(*sequences, environment=self.description),
                tokens=sum(rollout.extra["tokens"] for rollout in sequences),
                sampled_tokens=sum(rollout.extra["completion_tokens"] for rollout in sequences),
            )
        return TaskResult(task_id=task, run=run, failure=failure)
