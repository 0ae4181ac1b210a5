"""The world of ``fake_world.py`` as a pool, in a worker and in the test's own process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_environments.lost_worlds import Losses
from agent_environments.remote.line import RequestFailed, WorldLine
from contrib_support.fake_world import FakeWorld
from loop_contrib.worlds.pool import WorldKind, WorldPool
from loop_contrib.worlds.workers.worker_loop import Worker

FAKE_WORLD = Path(__file__).with_name("fake_world.py")


class FakePool(WorldPool):
    kind = WorldKind("fake", FAKE_WORLD, memory_mb=512)


class InProcessFakePool(FakePool):
    """No worker: requests are answered where they are made."""

    async def open(self) -> None:
        self._learn(await _Call().call(self.start_timeout_s, "tasks"))

    async def lease(self) -> WorldLine:
        return _Call()


class _Call(WorldLine):
    alive = True

    def __init__(self) -> None:
        super().__init__(Losses())
        self._worker = Worker(FakeWorld())

    async def _round_trip(self, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._worker.answer(dict(request))
        if "ok" not in answer:
            raise RequestFailed(answer["error"])
        return answer["ok"]

    def kill(self) -> None:
        """There is nothing to end."""
