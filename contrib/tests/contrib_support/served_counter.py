"""The counter environment as a service, in the test's own process; and a pool whose worlds wait to be let go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp.test_utils import TestServer

from agent_environments.counter import CounterPool
from agent_environments.protocol import create_pool
from agent_environments.remote.episode import RemotePool
from loop_contrib.services.server import EnvironmentServer
from support.adapter_support import word_spans

SPLITS = ("train", "dev")
TASK = "reach12_1"
TOKEN = "a-token"


@contextlib.asynccontextmanager
async def serving(pool: CounterPool, **options: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """The address that serves ``pool``, and a client with its token. No world is left open in the end."""
    async with TestServer(EnvironmentServer(pool, SPLITS, TOKEN, **options).application()) as server:
        url = str(server.make_url("")).rstrip("/")
        async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            yield url, http
    assert pool.status().open_worlds == 0


def client(protocol: str, url: str, **options: Any) -> RemotePool:
    """Our client of a service, by either protocol."""
    return create_pool(protocol, {"url": url, "dataset": "counter", **options}, word_spans)


class HeldPool(CounterPool):
    """A counter pool whose worlds do not start, and do not close, before they may."""

    def __init__(self) -> None:
        super().__init__(lambda text: [])
        self.starting, self.may_start = asyncio.Event(), asyncio.Event()
        self.closing, self.may_close = asyncio.Event(), asyncio.Event()
        for event in (self.may_start, self.may_close):
            event.set()

    async def acquire(self, episode_id: str) -> Any:
        environment = await super().acquire(episode_id)
        start, close = environment.start, environment.close

        async def held_start(task_id: str) -> Any:
            self.starting.set()
            await self.may_start.wait()
            return await start(task_id)

        async def held_close() -> None:
            self.closing.set()
            await self.may_close.wait()
            await close()

        environment.start, environment.close = held_start, held_close
        return environment
