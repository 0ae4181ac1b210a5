"""All vLLM servers of a node: started together, replaced when they fail, and ready once they hold the policies.

A server is "starting", "ready" or "down". It becomes ready only after every ready hook has run (the policy store's
loads the live adapters), so a request sent to a ready server finds its policy there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import ServerStartError, installed_vllm
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_metrics import Load

logger = logging.getLogger(__name__)

BACK_OFF_S = (1.0, 60.0)
STABLE_S = 300.0
"""A server that stayed up so long has its back-off forgotten."""


class ServerGroup:
    """All servers of a node."""

    def __init__(self, model: ModelConfig, config: ServersConfig, log_folder: str | Path) -> None:
        self._model = model
        self._config = config
        self._log_folder = Path(log_folder)
        self._hooks: list[Callable[[VllmServer], Awaitable[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.servers: list[VllmServer] = []

    @property
    def ready(self) -> list[VllmServer]:
        return [server for server in self.servers if server.state == "ready"]

    def add_ready_hook(self, hook: Callable[[VllmServer], Awaitable[None]]) -> None:
        """``hook(server)`` runs each time a server has started, before it counts as ready."""
        self._hooks.append(hook)

    async def start(self) -> None:
        """Start all servers and return when all are ready.

        Raises:
            ServerStartError: one did not come up; the others are stopped first.
        """
        if self._config.urls is None:
            installed_vllm()
            if not (Path(self._model.path) / "config.json").is_file():
                raise ServerStartError(f"no model at {self._model.path} (config.json is missing); check model.path")
        count = self._config.count if self._config.urls is None else len(self._config.urls)
        self.servers = [VllmServer(i, self._model, self._config, self._log_folder) for i in range(count)]
        loop = asyncio.get_running_loop()
        first_starts = [loop.create_future() for _ in self.servers]
        self._tasks = [
            asyncio.create_task(self._supervise(server, first), name=server.name)
            for server, first in zip(self.servers, first_starts, strict=True)
        ]
        try:
            await asyncio.gather(*first_starts)
        except BaseException:
            await self.stop()
            for first in first_starts:
                if first.done() and not first.cancelled():
                    first.exception()  # seen; only one of several can be raised
            raise

    async def stop(self) -> None:
        """Stop watching and end every process of ours; bounded."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await asyncio.gather(*(server.close() for server in self.servers))
        for server in self.servers:
            self._set_state(server, "down")

    def status(self) -> list[dict[str, Any]]:
        return [server.describe() for server in self.servers]

    def report_failure(self, server: VllmServer) -> None:
        """A request to ``server`` failed: probe it now rather than at the next poll."""
        server.suspect.set()

    def condemn(self, server: VllmServer, reason: str) -> None:
        """Have ``server`` restarted although it answers, and nothing sent there until then.

        One that is not ready is being replaced already.
        """
        if server.state == "ready":
            server.condemned = reason
            server.suspect.set()
            self._set_state(server, "down")

    async def wait_for_change(self) -> None:
        """Return when a server has become ready or ceased to be; the caller sets the deadline."""
        await self._changed.wait()

    def _set_state(self, server: VllmServer, state: str) -> None:
        server.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _supervise(self, server: VllmServer, first_start: asyncio.Future[None]) -> None:
        """Start, watch, replace, for ever; the first start's failure goes to ``first_start`` and ends it."""
        delay = BACK_OFF_S[0]
        while True:
            ready_at = None
            try:
                await server.launch()
                for hook in self._hooks:
                    await hook(server)
                # No await since the last hook: whoever changes policies next sees this server as ready.
                self._set_state(server, "ready")
                ready_at = time.monotonic()
                if not first_start.done():
                    first_start.set_result(None)
                logger.info("%s is ready at %s", server.name, server.url)
                server.last_error = await server.watch()
            except Exception as error:
                # Whatever a start or a hook raised: this server is of no use now, and the node goes on without it.
                server.last_error = f"{type(error).__name__}: {error}"
                if not first_start.done():
                    first_start.set_exception(error)
                    return
            self._set_state(server, "down")
            if ready_at is not None and time.monotonic() - ready_at > STABLE_S:
                delay = BACK_OFF_S[0]
            logger.warning("%s is down, restart in %g s: %s", server.name, delay, server.last_error)
            await server.kill()
            await asyncio.sleep(delay)
            delay = min(2 * delay, BACK_OFF_S[1])
            server.restarts += 1
            server.load = Load()
            self._set_state(server, "starting")
