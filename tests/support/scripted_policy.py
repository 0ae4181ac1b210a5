"""Episodes and collections by the node's own code, in the test's own process, of a policy that says what it is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from agent_environments.protocol import EnvironmentPool
from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import Rollout
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from rollout_server.collecting.collector import Collector, EpisodeKey
from rollout_server.collecting.episode import Episode
from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.collecting.sampling_client import SamplingClient
from rollout_server.inference.router import Generation
from rollout_server.metrics import NodeMetrics
from support.random_policy import write_tokenizer


class FakePolicy:
    """In place of router and policy store: what a turn says comes from ``generate`` of its subclasses."""

    def acquire(self, version: int) -> str:
        return "policy"

    def latest(self) -> int:
        return 0

    def release(self, what: object) -> None:
        """Nothing is held."""


def cut_turn(turn: list[int], stop_token_ids: Container[int], max_tokens: int) -> Generation:
    """A turn as vLLM cuts it: after the first stop token, or at the limit."""
    end = next(place for place, token in enumerate(turn) if token in stop_token_ids)
    ids = turn[: end + 1][:max_tokens]
    return Generation(ids, [-0.25] * len(ids), "stop" if ids[-1] in stop_token_ids else "length", "s", 0, 0.1)


async def play_episode(
    request: CollectionRequest, pool: EnvironmentPool, tokens: ChatFormat, policy: FakePolicy, start: Any = None
) -> list[Rollout]:
    """The rollouts of the first attempt at the request's first task."""
    services = EpisodeServices(pool, tokens, policy, policy, NodeMetrics())
    client = SamplingClient(request, "policy", services, start)
    return await Episode(EpisodeKey(request.tasks[0], 0, 0), 0, request, pool, client, start=start).run()


class ScriptedPolicy(FakePolicy):
    """``speak(rng)`` is the text of every turn; ``rng`` is seeded as vLLM is."""

    def __init__(self, tokens: ChatFormat, speak: Callable[[random.Random], str]) -> None:
        self._tokens = tokens
        self._speak = speak

    async def generate(self, *, seed: int, max_tokens: int, **_: Any) -> Generation:
        ids = [*self._tokens.encode_text(self._speak(random.Random(seed))), self._tokens.turn_end]
        assert len(ids) <= max_tokens
        return Generation(ids, [-0.1] * len(ids), "stop", "scripted", 0, 0.0)


async def collect(
    pool: EnvironmentPool,
    folder: Path,
    tasks: list[str],
    rollouts_per_task: int,
    speak: Callable[[random.Random], str],
    at_once: int = 4,
    **limits: Any,
) -> tuple[list[Rollout], Collector]:
    """All rollouts of a collection, and its collector at the end; episodes play one turn unless ``limits`` differ."""
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder)
    tokens = open_chat(folder)
    policy = ScriptedPolicy(tokens, speak)
    services = EpisodeServices(pool, tokens, policy, policy, NodeMetrics())
    bounds = Limits(**{"max_turns": 1, "max_context": 30_000, "episode_deadline_s": 300.0, **limits})
    request = CollectionRequest("scripted", tasks, rollouts_per_task, 0, limits=bounds)
    collector = Collector(request)
    rollouts: list[Rollout] = []

    async def run(key: EpisodeKey) -> None:
        try:
            policy_client = SamplingClient(request, "scripted", services)
            rollouts.extend(await Episode(key, collector.draw(key), request, pool, policy_client).run())
            collector.finished(key)
        except EpisodeFailed as error:
            collector.failed(key, error.reason, str(error))

    async def worker() -> None:
        while (key := collector.start_next()) is not None:
            await run(key)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return rollouts, collector
