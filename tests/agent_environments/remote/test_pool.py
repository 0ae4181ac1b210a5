"""What pools of remote episodes do whatever the other side is."""

import asyncio

import pytest

from agent_environments.protocol import EnvironmentCrashed
from agent_environments.remote.pool import RemotePool
from support.adapter_support import word_spans
from support.waiting import wait_until


class NoLines(RemotePool):
    """Nobody is on the other side."""

    async def _close_lines(self) -> None:
        pass


async def test_who_waits_for_a_place_is_refused_when_the_pool_closes():
    pool = NoLines("none", word_spans, 1, 100, 1.0, 1.0)
    await pool.acquire("first")
    waiting = [asyncio.create_task(pool.acquire(name)) for name in ("second", "third")]
    await wait_until(lambda: pool.status().waiting == 2)
    await pool.close()
    for task in waiting:
        with pytest.raises(EnvironmentCrashed, match="the pool is closed"):
            await task
    assert (pool.status().open_worlds, pool.status().waiting) == (0, 0)
