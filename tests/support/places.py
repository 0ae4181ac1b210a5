"""What every pool with places does as it closes."""

from __future__ import annotations

import asyncio

import pytest

from agent_environments.protocol import EnvironmentCrashed, EnvironmentPool
from support.waiting import wait_until


async def check_who_waits_is_refused(pool: EnvironmentPool) -> None:
    """``pool`` is open and has one place."""
    first = await pool.acquire("first")
    waiting = [asyncio.create_task(pool.acquire(name)) for name in ("second", "third")]
    await wait_until(lambda: pool.status().waiting == 2)
    await pool.close()
    for task in waiting:
        with pytest.raises(EnvironmentCrashed, match="the pool is closed"):
            await task
    await first.close()
    assert (pool.status().open_worlds, pool.status().waiting) == (0, 0)
