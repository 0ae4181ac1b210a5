"""The line to a world: a process of a fork server under another interpreter, which answers one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agent_environments.losses import Loss, Losses, WorldLost
from agent_environments.protocol import EnvironmentCrashed
from agent_environments.remote.line import Line, RequestFailed
from loop_plumbing.forked_process import ForkedProcess, ProcessEnded
from loop_plumbing.moving import while_moving

AGENTS_REQUESTS = ("step", "grade")
"""How long they take may be an agent's doing."""
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def scrubbed_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a server of worlds: nothing of the owner's, which may hold tokens, gets near a world."""
    return {
        "HOME": "/nonexistent",
        "PATH": SYSTEM_PATH,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets iterate in the same order in every world
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        **extra,
    }


class WorldProcess(Line):
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
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def _round_trip(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._process.exchange(request)
        except ProcessEnded as error:
            loss = Loss.KILLED if error.killed else Loss.ENDED
            raise WorldLost(f"the world ended at {request['op']!r}: {error}", loss) from error
        except EnvironmentCrashed as error:
            raise WorldLost(f"the world ended at {request['op']!r}: {error}", Loss.REFUSED) from error
        match answer:
            case {"ok": dict(result)}:
                return result
            case {"error": str(message)}:
                raise RequestFailed(message)
        raise WorldLost(f"the world's answer to {request['op']!r} is none: {str(answer)[:200]}", Loss.ENDED)

    async def _in_time(self, deadline_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        # What a world does for no command of an agent's it may do slowly; a command could compute for ever.
        if request["op"] in AGENTS_REQUESTS:
            return await super()._in_time(deadline_s, request)
        return await while_moving(self._round_trip(request), self.pid, deadline_s)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        self._process.kill()
