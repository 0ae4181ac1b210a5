"""All vLLM servers of a node: started together, replaced when they fail, and ready once they hold the policies.

A server is "starting", "ready", "asleep", "down" (being ended), "waiting" (to be started) or "given up". It becomes
ready only after :attr:`ServerGroup.on_ready` (the policy store loads and proves the live adapters), so a request that
is sent to a ready server finds its policy there.

Servers that share GPUs with a trainer rest during the trainer's turn: running servers sleep, and none is started.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import ServerStartError, installed_vllm
from rollout_server.inference.server import SWAP_S, TRANSPORT_ERRORS, Fault, ServerHangs, VllmServer
from rollout_server.inference.server_metrics import Load

logger = logging.getLogger(__name__)

BACK_OFF_S = (1.0, 60.0)
STABLE_S = 300.0
"""A server that stayed up so long has its back-off forgotten."""
DEATHS_ALIKE = 3
"""Deaths in a row of the same error, without a token for a client in between, after which a server is given up; or
turns in a row at whose beginning it does not sleep, or at whose end it does not wake, with or without tokens."""


class _Record:
    """The record of one server's faults, which decides whether and when to start the server again."""

    def __init__(self) -> None:
        self._pause_s = BACK_OFF_S[0]
        self._hung_before = False
        self._cause = ""
        self._alike = 0

    def died(self, cause: str | None, useful: bool) -> bool:
        """Count a death, and return whether too many had this ``cause``. A kill (cause None) does not count.

        ``useful`` says that the server had done useful work since it was ready.
        """
        if cause is None:
            return False
        cause = re.sub(r"0x[0-9a-f]+|\d+", "#", cause)
        self._alike = self._alike + 1 if cause == self._cause and not useful else 1
        self._cause = cause
        return self._alike >= DEATHS_ALIKE

    def pause(self, ready_s: float, start_s: float, hung: bool) -> float:
        """Return the seconds until the next start. The server was ready for ``ready_s``; its start took ``start_s``.

        A start is the hardest work of all. A server that hangs again may be slow for reasons unknown to us: it pauses
        for as long as its start took.
        """
        if ready_s > STABLE_S:
            self._pause_s, self._hung_before = BACK_OFF_S[0], False
        pause = max(self._pause_s, start_s) if hung and self._hung_before else self._pause_s
        self._pause_s = min(2 * self._pause_s, BACK_OFF_S[1])
        self._hung_before = hung
        return pause


class ServerAwake(RuntimeError):
    """A server that should sleep still holds its GPU's memory. The caller can ask again."""


async def _fault_of_start(server: VllmServer, error: Exception) -> Fault:
    """Return the fault that made a start or a hook fail. A kill or a broken connection has ``cause`` None."""
    hangs = isinstance(error, ServerHangs)
    reason = str(error) or repr(error)
    killed = server.has_ended or (isinstance(error, TRANSPORT_ERRORS) and not hangs)
    return Fault(reason, hangs, await server.own_error() or (None if killed else reason))


class ServerGroup:
    """All servers of a node."""

    def __init__(self, model: ModelConfig, config: ServersConfig, log_folder: str | Path) -> None:
        self._model = model
        self._config = config
        self._log_folder = Path(log_folder)
        self._tasks: list[asyncio.Task[None]] = []
        self._given_up = asyncio.Event()
        self._changed = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self.servers: list[VllmServer] = []
        self.on_ready: Callable[[VllmServer], Awaitable[None]] | None = None
        """Called each time a server has started or woken, before it counts as ready."""

    @property
    def ready(self) -> list[VllmServer]:
        """The servers that may get requests; empty during the trainer's turn."""
        return [server for server in self.servers if server.state == "ready" and not self.resting]

    @property
    def resting(self) -> bool:
        """True during the trainer's turn, in which no server gets a request or is started."""
        return not self._may_run.is_set()

    def rest(self) -> None:
        """Begin the trainer's turn; the servers still have their memory until :meth:`sleep`."""
        self._may_run.clear()

    async def sleep(self) -> None:
        """Put all servers to sleep. Return when none holds GPU memory; a server of ours that fails to sleep is ended.

        Raises:
            ServerAwake: a server still holds memory, or the node has not yet looked for its servers; ask again.
        """
        if not self.servers:
            raise ServerAwake("the node has not looked for its servers yet")
        await asyncio.gather(*(self._put_to_sleep(server) for server in self.servers))

    async def _put_to_sleep(self, server: VllmServer) -> None:
        try:
            async with asyncio.timeout(SWAP_S):
                while server.state in ("starting", "down"):
                    await self.wait_for_change()
        except TimeoutError:
            raise ServerAwake(f"{server.waits_for()}; it cannot sleep yet") from None
        # A server of ours that waits for its start was ended before; one elsewhere may run all the same.
        unseen = server.external and server.state == "waiting"
        if server.state != "ready" and not unseen:
            return
        try:
            async with asyncio.timeout(SWAP_S):
                await server.sleep()
        except Exception as error:  # any error: the trainer needs its memory
            if unseen and isinstance(error, aiohttp.ClientConnectorError):
                return  # it is gone
            if server.external:
                raise ServerAwake(str(error) or f"{server.name} ({server.url}) does not fall asleep") from error
            self._swap_failed(server, "sleep", f"{server.name} does not fall asleep: {str(error) or repr(error)}")
            return await self._put_to_sleep(server)
        del server.failed_swaps["sleep"]
        if server.state == "ready":
            self._set_state(server, "asleep")

    async def wake(self) -> None:
        """End the trainer's turn. Sleeping servers wake and prove their policies again; other servers start.

        A server that does not wake, or wakes with other weights, is restarted.
        """
        if self.resting:
            for server in self.servers:
                if server.state == "ready":  # it did not confirm that it sleeps; it may do so all the same
                    self._set_state(server, "asleep")
            self._may_run.set()
        await asyncio.gather(*(self._wake(server) for server in self.servers if server.state == "asleep"))

    async def _wake(self, server: VllmServer) -> None:
        try:
            async with asyncio.timeout(SWAP_S):
                await server.wake()
                await self._prepare(server)
        except Exception as error:
            self._swap_failed(server, "wake", f"{server.name} did not wake as it was: {str(error) or repr(error)}")
            return
        del server.failed_swaps["wake"]
        if server.state == "asleep":
            self._set_state(server, "ready")

    async def _prepare(self, server: VllmServer) -> None:
        """Load the policies on the server. No await may stand between this and state "ready": the next change of
        policies must find the server ready."""
        server.note_activity("loads its policies")
        if self.on_ready is not None:
            await self.on_ready(server)

    async def start(self) -> None:
        """Start all servers and return when all are ready.

        Raises:
            ServerStartError: a server did not come up; the others are stopped before the raise.
        """
        if self._config.urls is None:
            if installed_vllm().cpu and self._config.share is not None:
                raise ServerStartError("servers.share needs vLLM on a GPU: its CPU build cannot sleep; set it to null")
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
                    first.exception()  # retrieved; only one of several can be raised
            raise

    async def stop(self) -> None:
        """Stop watching, and end every process of ours within a bounded time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await asyncio.gather(*(server.close() for server in self.servers))
        for server in self.servers:
            self._set_state(server, "down")

    async def given_up(self) -> str:
        """Wait until no server is left that might come back, and return the reasons in one line."""
        await self._given_up.wait()
        return "; ".join(server.last_error or server.name for server in self.servers)

    def waits_for(self) -> list[str]:
        """Return a line for each server that is not ready: its activity, and for how long."""
        return [server.waits_for() for server in self.servers if server.state != "ready"]

    def status(self) -> list[dict[str, Any]]:
        return [server.describe() for server in self.servers]

    def report_failure(self, server: VllmServer) -> None:
        """Probe ``server``, which failed a request, immediately and not only at the next poll."""
        server.suspect.set()

    def condemn(self, server: VllmServer, reason: str) -> None:
        """Restart ``server`` although it answers. The server gets no request until it has restarted.

        A server that is neither ready nor asleep is being replaced already.
        """
        if server.state in ("ready", "asleep"):
            server.condemned = reason
            server.suspect.set()
            self._set_state(server, "down")

    def _swap_failed(self, server: VllmServer, swap: str, reason: str) -> None:
        server.failed_swaps[swap] += 1
        self.condemn(server, reason)

    async def wait_for_change(self) -> None:
        """Wait until a server becomes ready or stops being ready. The caller sets the deadline."""
        await self._changed.wait()

    def _set_state(self, server: VllmServer, state: str) -> None:
        server.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _supervise(self, server: VllmServer, first_start: asyncio.Future[None]) -> None:
        """Start, watch and replace the server until it is given up. A failed first start is set on ``first_start``.

        A server that is killed without an error during its first start is started again: twice if it had answered
        before the kill, else once.
        """
        record = _Record()
        while True:
            if self.resting:
                server.note_activity("waits for the trainer's turn to end (POST /v1/servers/wake)")
                self._set_state(server, "waiting")
                await self._may_run.wait()
            self._set_state(server, "starting")
            started = time.monotonic()
            answered, ready_at = False, None
            try:
                await server.launch()
                answered = True
                await self._prepare(server)
                self._set_state(server, "ready")
                ready_at = time.monotonic()
                if not first_start.done():
                    first_start.set_result(None)
                logger.info("%s is ready at %s after %.1f s", server.name, server.url, ready_at - started)
                fault = await server.watch()
            except Exception as error:
                # After any error of a start or a hook this server is of no use, and the node goes on without it.
                fault = await _fault_of_start(server, error)
                killed = fault.cause is None and server.restarts + (1 if answered else 2) < DEATHS_ALIKE
                if not first_start.done() and not killed:
                    first_start.set_exception(error)
                    return
            server.last_error = fault.reason
            self._set_state(server, "down")
            start_s = (ready_at or time.monotonic()) - started
            ready_s = time.monotonic() - ready_at if ready_at is not None else 0.0
            if not server.external:
                if max(server.failed_swaps.values(), default=0) >= DEATHS_ALIKE:
                    return await self._give_up(server, "in a row")
                if record.died(fault.cause, useful=ready_s > STABLE_S or server.sampled):
                    return await self._give_up(server, "in a row, without a token in between")
            pause = record.pause(ready_s, start_s, fault.hangs)
            logger.warning("%s is down, restart in %.1f s: %s", server.name, pause, server.last_error)
            await server.kill()
            server.note_activity("is to be started again")
            self._set_state(server, "waiting")
            await asyncio.sleep(pause)
            server.restarts += 1
            server.load = Load()

    async def _give_up(self, server: VllmServer, how: str) -> None:
        await server.kill()
        server.note_activity("is given up")
        server.last_error = f"{DEATHS_ALIKE} times {how}: {server.last_error}"
        logger.error("%s is given up, %s", server.name, server.last_error)
        self._set_state(server, "given up")
        if all(other.state == "given up" for other in self.servers):
            self._given_up.set()
