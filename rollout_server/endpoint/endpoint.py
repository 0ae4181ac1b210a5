"""The node's services for agents of your own: sessions of episodes by their keys, and keys of no episode.

A key of no episode is for other programs, such as a judge or a simulated human. The request that opens it names the
model: the base model, a policy version, or the newest version at each call. Nothing is recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from loop_formats.collection_request import CollectionRequest, Limits, Sampling
from loop_formats.schema import STRICT, require
from loop_plumbing.agent_timeout import AgentTimeout
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.policy_sampler import EpisodeServices, PolicySampler
from rollout_server.endpoint.harness_episode import HarnessEpisode
from rollout_server.endpoint.session import Session
from rollout_server.endpoint.sessions import Sessions
from rollout_server.inference.command import BASE_MODEL_NAME

LATEST = "policy"
_VERSION = re.compile(r"policy-v(\d{1,9})")
UNBOUNDED_TURNS = 2**31


@dataclass(frozen=True, config=STRICT)
class ServeRequest:
    """The settings under which a key is served."""

    model: str = LATEST
    """``base``, ``policy-v<number>``, or ``policy``, the newest version at each call."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0
    max_tokens_per_turn: PositiveInt = 1500
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a call, prompt and sampled ones together; null is the servers' own limit."""
    seconds: Annotated[float, Field(gt=0, le=7 * 86_400)] = 3600.0
    """Seconds after which the key ends."""

    def __post_init__(self) -> None:
        known = self.model in (LATEST, BASE_MODEL_NAME) or _VERSION.fullmatch(self.model)
        require(known, f"model {self.model!r} is not one of {BASE_MODEL_NAME}, {LATEST}, policy-v<number>")


@dataclasses.dataclass(frozen=True)
class _Served:
    name: str
    version: int | None
    expiry: asyncio.TimerHandle


class Endpoint:
    """The recording endpoint of a node. It closes keys without an episode when their time is over.

    Attributes:
        sessions: the open sessions by their keys.
    """

    def __init__(self, services: EpisodeServices, max_context: int) -> None:
        self.sessions = Sessions()
        self._services = services
        self._max_context = max_context
        self._served: dict[str, _Served] = {}
        self._closing: set[asyncio.Task[bool]] = set()

    def attempt(self, key: EpisodeKey, draw: int, request: CollectionRequest, model: str | None) -> HarnessEpisode:
        """Return a program's attempt at an episode. ``model`` is the policy's name; None means the newest policy."""
        return HarnessEpisode(key, draw, request, model, self._services, self.sessions)

    def open_key(self, request: ServeRequest) -> str:
        """Return a new key that belongs to no episode.

        Raises:
            UnknownPolicy: the version is not served.
            ConfigError: ``max_context`` is above the servers' limit.
        """
        longest = request.max_context or self._max_context
        require(longest <= self._max_context, f"max_context {longest} is above the servers' {self._max_context}")
        version, model = None, None
        if match := _VERSION.fullmatch(request.model):
            version = int(match[1])
            model = self._services.policies.acquire(version)
        elif request.model == BASE_MODEL_NAME:
            model = BASE_MODEL_NAME
        limits = Limits(max_turns=UNBOUNDED_TURNS, max_tokens_per_turn=request.max_tokens_per_turn, max_context=longest)
        sampler = PolicySampler(request.sampling, limits, version or 0, model, self._services)
        name, seconds = f"serving-{secrets.token_hex(6)}", request.seconds
        session = Session(
            name, request.seed, limits, AgentTimeout(seconds), sampler, self._services.tokens, record=False
        )
        key = self.sessions.open(session)
        expiry = asyncio.get_running_loop().call_later(seconds, self._expire, key)
        self._served[key] = _Served(name, version, expiry)
        return key

    def _expire(self, key: str) -> None:
        task = asyncio.get_running_loop().create_task(self.close_key(key))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close_key(self, key: str) -> bool:
        """End a key that belongs to no episode. Return False if no such key is open."""
        served = self._served.pop(key, None)
        if served is None:
            return False
        served.expiry.cancel()
        await self.sessions.close(key)
        self._services.router.release(served.name)
        if served.version is not None:
            self._services.policies.release(served.version)
        return True

    async def close_all(self) -> None:
        """End all keys that belong to no episode."""
        for key in list(self._served):
            await self.close_key(key)
