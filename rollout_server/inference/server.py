"""One vLLM server: started as a child or found at its address, watched, ended.

A child runs under :mod:`agent_environments.process_guard`, which ends all of a server's processes when this process
dies in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from agent_environments import process_guard
from agent_environments.secret import read_secret
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import (
    ServerStartError,
    check_release,
    installed_vllm,
    server_command,
    server_environment,
)
from rollout_server.inference.server_metrics import Load, parse_load

POLL_S = 2.0
PROBE_TIMEOUT_S = 10.0
PROBES_MISSED = 3
STALL_S = 300.0
"""A server with running requests that samples and reads no token for so long is hung, whatever its /health says."""
GRACE_S = 5.0
STOP_S = GRACE_S + process_guard.KILL_DEADLINE_S + 5.0
NICENESS = 5
"""Of a server, once it is ready, that shares its processors with the worlds. They make the requests: they go first,
and the requests meet in one batch. A step of the engine costs nearly the same for one token as for twenty."""
AUTOGROUP_RETRY_S = 0.1
"""The kernel takes one change of an autogroup in this time from who is not root."""

_TRANSPORT_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _go_last(root: int) -> None:
    """Let a process and all below it run when others have nothing to do, most of the time.

    Between sessions Linux's autogroups decide, where there are any, and a process's own niceness counts only within.
    """
    groups, sessions = set(), set()
    for pid in (root, *process_guard.descendants(root)):
        with contextlib.suppress(OSError):  # it has ended; whoever waits for it is told
            groups.add(os.getpgid(pid))
            sessions.add(os.getsid(pid))
    for group in groups:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, group, NICENESS)
    for session in sessions:
        await _autogroup_goes_last(session)


async def _autogroup_goes_last(session: int) -> None:
    for _ in range(5):
        try:
            return await asyncio.to_thread(_set_autogroup, session)
        except BlockingIOError:
            await asyncio.sleep(AUTOGROUP_RETRY_S)
        except OSError:  # no autogroups here
            return


def _set_autogroup(session: int) -> None:
    Path(f"/proc/{session}/autogroup").write_text(str(NICENESS))


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
        self._api_key = read_secret("VLLM_API_KEY") if self.external else secrets.token_hex(16)
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
        elif installed_vllm().cpu and self._process is not None:
            await _go_last(self._process.pid)

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
