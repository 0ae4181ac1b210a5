"""The line to a world: a process of a fork server under another interpreter, which answers one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agent_environments.lost_worlds import Loss, Losses, WorldLost, answered
from agent_environments.remote.line import RequestFailed, WorldLine
from loop_plumbing.forked_process import ForkedProcess
from loop_plumbing.moving import while_moving

AGENTS_REQUESTS = ("step", "grade")
"""Requests whose duration may be an agent's doing."""


class WorldProcess(WorldLine):
    """A running world."""

    def __init__(self, process: ForkedProcess, losses: Losses) -> None:
        super().__init__(losses)
        self._process = process
        process.ended.add_done_callback(self._note_end)

    def _note_end(self, ended: asyncio.Future[int | None]) -> None:
        if not self._process.killed:
            self._ended()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def _round_trip(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match answer := await answered(self._process.exchange(request), f"the world ended at {request['op']!r}"):
            case {"ok": dict(result)}:
                return result
            case {"error": str(message)}:
                raise RequestFailed(message)
        raise WorldLost(f"the world's answer to {request['op']!r} is malformed: {str(answer)[:200]}", Loss.ENDED)

    async def _in_time(self, deadline_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        # A world may be slow in its own work; a command of an agent could compute for ever.
        if request["op"] in AGENTS_REQUESTS:
            return await super()._in_time(deadline_s, request)
        return await while_moving(self._round_trip(request), self.pid, deadline_s)

    def kill(self) -> None:
        """Kill the world's process and all processes that it started."""
        self._process.kill()
