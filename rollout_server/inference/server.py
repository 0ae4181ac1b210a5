"""vLLM servers: started as children, watched, restarted, and given back to the router when they hold the policies.

A server is "starting", "ready" or "down". It becomes ready only after every ready hook has run (the policy store's
loads the live adapters), so a request sent to a ready server finds its policy there. Children run under
:mod:`agent_environments.process_guard`, which ends all of a server's processes when this process dies in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from agent_environments import process_guard
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import (
    ServerStartError,
    check_release,
    installed_vllm,
    server_command,
    server_environment,
)

logger = logging.getLogger(__name__)

POLL_S = 2.0
PROBE_TIMEOUT_S = 10.0
PROBES_MISSED = 3
STALL_S = 300.0
"""A server with running requests that samples and reads no token for so long is hung, whatever its /health says."""
BACK_OFF_S = (1.0, 60.0)
STABLE_S = 300.0
"""A server that stayed up so long has its back-off forgotten."""
GRACE_S = 5.0
STOP_S = GRACE_S + process_guard.KILL_DEADLINE_S + 5.0

_TRANSPORT_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
_ADAPTERS = re.compile(r"^vllm:lora_requests_info\{([^}]*)\} ([-+.\deE]+)$", re.MULTILINE)
_SAMPLE = re.compile(r"^vllm:(\w+?)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """What a server said of itself in /metrics; counts are of requests or tokens, ``kv_usage`` is a fraction."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    generated_tokens: float = 0.0
    prompt_tokens: float = 0.0
    prefix_hits: float = 0.0
    prefix_queries: float = 0.0


_METRIC_OF_FIELD = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_usage": "kv_cache_usage_perc",
    "generated_tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "prefix_hits": "prefix_cache_hits_total",
    "prefix_queries": "prefix_cache_queries_total",
}


def parse_metrics(text: str) -> dict[str, float]:
    """The samples of a vLLM server's Prometheus text, by name without "vllm:"; several engines are added up."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def parse_load(text: str) -> Load:
    """How busy a vLLM server is, from its Prometheus text; absent metrics count 0."""
    sums = parse_metrics(text)
    return Load(**{field: sums.get(metric, 0.0) for field, metric in _METRIC_OF_FIELD.items()})


def adapters_at_work(text: str) -> str:
    """The names, comma separated, of the adapters that running and waiting requests use, from the Prometheus text.

    vLLM keeps a line for every combination there ever was, valued with the time it was last true: the newest counts.
    """
    lines = _ADAPTERS.findall(text)
    return max(lines, key=lambda line: float(line[1]))[0] if lines else ""


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class VllmServer:
    """One server: its process if it is ours, its admin connection, and what is known of its state."""

    def __init__(self, index: int, model: ModelConfig, config: ServersConfig, log_folder: Path) -> None:
        self.name = f"vllm-{index}"
        self.index = index
        self.external = config.urls is not None
        self.url = config.urls[index].rstrip("/") if config.urls is not None else ""
        self.log_path = log_folder / f"{self.name}.log"
        self.state = "starting"
        self.restarts = 0
        self.last_error: str | None = None
        self.load = Load()
        self.suspect = asyncio.Event()
        self.condemned: str | None = None
        self._model = model
        self._config = config
        self._api_key = os.environ.get("VLLM_API_KEY", "") if self.external else secrets.token_hex(16)
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._admin = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=8, force_close=True))

    @property
    def headers(self) -> dict[str, str]:
        """What every request to this server must carry."""
        return {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}

    @property
    def pid(self) -> int | None:
        """The guard's process id: all of the server's processes are below it."""
        return self._process.pid if self._process is not None else None

    async def request(self, method: str, path: str, payload: Any = None, *, timeout_s: float) -> tuple[int, str]:
        """One admin request: status and body. Raises aiohttp.ClientError, OSError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        target = f"{self.url}{path}"
        async with self._admin.request(method, target, json=payload, headers=self.headers, timeout=timeout) as answer:
            return answer.status, await answer.text()

    async def launch(self) -> None:
        """Start the process (ours only) and wait until it answers.

        Raises:
            ServerStartError: it ended first, or the deadline passed; with the last lines of its log.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        self.condemned = None
        self.suspect.clear()
        if not self.external:
            await self._spawn()
        while True:
            with contextlib.suppress(*_TRANSPORT_ERRORS):
                status, _ = await self.request("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
                # Ours must be alive too: while it starts, a stranger could have taken the port.
                if status == 200 and not self._has_ended():
                    break
            if self._has_ended():
                raise ServerStartError(f"{self.name} ended while starting{self._log_tail()}")
            if time.monotonic() > deadline:
                cure = "is the URL right?" if self.external else "raise servers.start_timeout_s or read the log"
                waited = f"{self._config.start_timeout_s:g} s"
                raise ServerStartError(f"{self.name} ({self.url}) not ready after {waited}; {cure}{self._log_tail()}")
            await asyncio.sleep(0.25)
        if self.external:
            await self._check_external()

    async def _spawn(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        cpu = installed_vllm().cpu
        command = server_command(self._model, self._config, port, cpu=cpu)
        guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), str(GRACE_S), *command]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *guard,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=server_environment(self._config, self.index, self._api_key, cpu=cpu),
            )

    async def _check_external(self) -> None:
        status, body = await self.request("GET", "/version", timeout_s=PROBE_TIMEOUT_S)
        version = re.search(r'"version":\s*"([^"]+)"', body)
        if status != 200 or version is None:
            raise ServerStartError(f"{self.url} does not answer /version as vLLM does (HTTP {status})")
        check_release(version[1], self.url)

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    def _log_tail(self, lines: int = 12) -> str:
        if self.external:
            return ""
        with open(self.log_path, "rb") as log:
            log.seek(max(self._log_start, os.path.getsize(self.log_path) - 8192))
            text = log.read().decode(errors="replace")
        tail = [line for line in text.splitlines() if line.strip()][-lines:]
        return "; the log ends:\n" + "\n".join([*tail, f"(all of it: {self.log_path})"])

    async def probe(self) -> str | None:
        """Refresh ``load``. Returns why the server must be replaced, or None; raises on a missed answer."""
        if self._has_ended():
            return f"{self.name} ended{self._log_tail()}"
        status, body = await self.request("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
        if status != 200:
            return f"{self.name}: /health answers {status} {body[:200]}{self._log_tail()}"
        status, body = await self.request("GET", "/metrics", timeout_s=PROBE_TIMEOUT_S)
        if status == 200:
            self.load = parse_load(body)
        return None

    async def watch(self) -> str:
        """Probe until the server must be replaced; returns why."""
        missed, progress, moved_at = 0, 0.0, time.monotonic()
        ended = asyncio.ensure_future(self._process.wait()) if self._process is not None else None
        suspected = asyncio.ensure_future(self.suspect.wait())
        try:
            while True:
                await asyncio.wait(
                    [task for task in (ended, suspected) if task is not None],
                    timeout=POLL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if suspected.done():
                    self.suspect.clear()
                    suspected = asyncio.ensure_future(self.suspect.wait())
                if self.condemned is not None:
                    return self.condemned
                try:
                    reason = await self.probe()
                except _TRANSPORT_ERRORS as error:
                    missed += 1
                    if missed >= PROBES_MISSED:
                        return f"{self.name} does not answer: {error!r}{self._log_tail()}"
                    await asyncio.sleep(0.1)
                    continue
                if reason is not None:
                    return reason
                missed = 0
                tokens = self.load.generated_tokens + self.load.prompt_tokens
                if tokens != progress or self.load.running == 0:
                    progress, moved_at = tokens, time.monotonic()
                elif time.monotonic() - moved_at > STALL_S:
                    return f"{self.name} has {self.load.running:g} running requests and no token in {STALL_S:g} s"
        finally:
            suspected.cancel()
            if ended is not None:
                ended.cancel()

    async def kill(self) -> None:
        """End the process and all below it; bounded. An external server is left alone."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
        if process.returncode is None or process.returncode < 0:
            # The guard itself hangs or was killed; its session still holds the server's processes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def close(self) -> None:
        await self.kill()
        await self._admin.close()

    def describe(self) -> dict[str, Any]:
        """Plain data for /health, /metrics and the status line."""
        return {
            "name": self.name,
            "url": self.url,
            "state": self.state,
            "pid": self.pid,
            "external": self.external,
            "restarts": self.restarts,
            "last_error": self.last_error,
            **asdict(self.load),
        }


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
        """Have ``server`` restarted although it answers."""
        server.condemned = reason
        server.suspect.set()

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
