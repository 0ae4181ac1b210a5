"""A vLLM server: started as a child or found at its address, watched, ended.

A child runs under :mod:`loop_plumbing.process_guard`, which ends all of a server's processes when this process
dies in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import aiohttp

from loop_plumbing import process_guard
from loop_plumbing.moving import Movement, Stalled, while_moving
from loop_plumbing.secret import read_secret
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import (
    BASE_MODEL_NAME,
    ServerStartError,
    check_release,
    installed_vllm,
    server_command,
    server_environment,
)
from rollout_server.inference.server_log import last_line, own_error
from rollout_server.inference.server_metrics import Load, parse_load

POLL_S = 2.0
START_POLL_S = 0.25
PROBE_TIMEOUT_S = 10.0
PROBES_MISSED = 3
HANG_S = 120.0
"""A server with work to do that neither uses nor wants a processor or a disk, nor writes a log for so long, hangs."""
MOVED_S = 0.2
"""Processor time that counts as a move; a process that only polls now and then uses less."""
STALL_S = 300.0
"""Seconds without a sampled or read token after which a server with running requests is hung, even if its /health is
good: if it is idle, or has used as many seconds of a processor. A server that does not answer may use as many, too."""
EXTERNAL_START_S = 300.0
"""A server that somebody else started answers by then, or its URL is wrong."""
SWAP_S = 300.0
"""Deadline of falling asleep or waking up; the weights travel between GPU and host in seconds."""
FIRST_TOKENS = 2
"""Tokens that the first request samples, which is ours."""
GRACE_S = 5.0
STOP_S = GRACE_S + process_guard.KILL_DEADLINE_S + 5.0
AUTOGROUP_RETRY_S = 0.1
"""The kernel takes one change of an autogroup in this time from a user who is not root."""

TRANSPORT_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)

T = TypeVar("T")


class ServerEnded(ServerStartError, ConnectionError):
    """The processes of a server of ours have ended."""


class ServerHangs(ServerStartError, TimeoutError):
    """A server of ours runs but does nothing, or was not ready within the longest time allowed."""


@dataclass(frozen=True)
class Fault:
    """The reason why a server must be replaced: ``reason`` is one line.

    ``hangs`` says that the server runs but does not answer or work. ``cause`` is the fatal error, if the log has one.
    """

    reason: str
    hangs: bool = False
    cause: str | None = None


def free_port() -> int:
    """Return a loopback port that was free when this function looked."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _session_goes_last(leader: int, niceness: int) -> None:
    """Lower the priority of a process session against others, through Linux's autogroups if there are any."""
    for _ in range(5):
        try:
            file = Path(f"/proc/{leader}/autogroup")
            await asyncio.to_thread(file.write_text, str(niceness), encoding="utf-8")
            return
        except BlockingIOError:
            await asyncio.sleep(AUTOGROUP_RETRY_S)
        except OSError:  # no autogroups here
            return


def _hangs(movement: Movement, patience_s: float) -> bool:
    """Return whether a server hangs: its answer is later than ``patience_s``, and it is idle or works in vain."""
    idle, vain = movement.idle_s > HANG_S, movement.spent_s > STALL_S
    return movement.elapsed_s > patience_s and (idle or vain)


def _did(movement: Movement) -> str:
    return f"after {movement.elapsed_s:.0f} s, in which it used {movement.spent_s:.1f} s of processor time"


class VllmServer:
    """A vLLM server: its process (if it is ours), its admin connection, and its state.

    ``failed_swaps`` counts the failures in a row, across restarts, to "sleep" or to "wake" unchanged.
    """

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
        self.failed_swaps: Counter[str] = Counter()
        self._model = model
        self._config = config
        self._api_key = read_secret("VLLM_API_KEY") if self.external else secrets.token_hex(16)
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._activity, self._since = "starts", time.monotonic()
        self._admin = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=8, force_close=True))

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request to this server must carry."""
        return {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}

    @property
    def pid(self) -> int | None:
        """The process id of the guard, which is the parent of all of the server's processes."""
        return self._process.pid if self._process is not None else None

    async def request(self, method: str, path: str, payload: Any = None, *, timeout_s: float) -> tuple[int, str]:
        """Send an admin request, and return status and body. Raises aiohttp.ClientError, OSError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        target = f"{self.url}{path}"
        async with self._admin.request(method, target, json=payload, headers=self.headers, timeout=timeout) as answer:
            return answer.status, await answer.text()

    async def work(self, path: str, payload: Any, *, timeout_s: float) -> tuple[int, str]:
        """Send a POST that makes the server compute. Wait for a server of ours as long as it makes progress.

        Raises:
            ServerEnded, ServerHangs: the server ended, or makes no progress. Otherwise errors of :meth:`request`, after
                ``timeout_s`` where the server is not ours.
        """
        if self.external:
            return await self.request("POST", path, payload, timeout_s=timeout_s)
        limit = self._config.start_timeout_s
        return await self._while_moving(lambda: self.request("POST", path, payload, timeout_s=limit), limit)

    async def sleep(self) -> None:
        """Make the server release its GPU's memory: weights move to host memory, the KV cache is dropped.

        Raises:
            ServerStartError: the server does not sleep. Otherwise errors of :meth:`work`.
        """
        self.note_activity("falls asleep")
        # Clients that still wait for tokens ask again, once it is awake.
        await self._swap("/sleep?level=1&mode=abort", asleep=True)
        self.note_activity("sleeps until the trainer's turn ends (POST /v1/servers/wake)")

    async def wake(self) -> None:
        """Make the server take its GPU's memory again. Its policies must be proven again after that. Raises the errors
        of :meth:`sleep`."""
        self.note_activity("wakes up")
        await self._swap("/wake_up", asleep=False)

    async def _swap(self, path: str, asleep: bool) -> None:
        status, body = await self.work(path, None, timeout_s=SWAP_S)
        if status != 200:
            cure = "; start it with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1" if self.external else ""
            answer = f"HTTP {status} {' '.join(body.split())[:300]}"
            raise ServerStartError(f"{self.name} ({self.url}) refuses {path.partition('?')[0]}: {answer}{cure}")
        if await self._is_asleep() != asleep:
            raise ServerStartError(f"{self.name} ({self.url}) answered {path.partition('?')[0]} and did not do it")

    async def _is_asleep(self) -> bool:
        status, body = await self.request("GET", "/is_sleeping", timeout_s=PROBE_TIMEOUT_S)
        try:
            return json.loads(body)["is_sleeping"] is True
        except (ValueError, KeyError, TypeError) as error:
            raise ServerStartError(f"{self.url} does not answer /is_sleeping as vLLM does (HTTP {status})") from error

    async def launch(self) -> None:
        """Start the process, if the server is ours, and wait until the server has answered a first request.

        Raises:
            ServerStartError: the server ended or hangs; the message holds the server's last error.
        """
        self.condemned = None
        self.suspect.clear()
        self.note_activity("starts")
        if self.external:
            return await self._launch_external()
        await self._spawn()
        await self._while_moving(self._until_healthy, self._config.start_timeout_s)
        self.note_activity("compiles for its first request")
        await self._first_request()

    async def _launch_external(self) -> None:
        limit = min(EXTERNAL_START_S, self._config.start_timeout_s)
        try:
            async with asyncio.timeout(limit):
                await self._until_healthy()
        except TimeoutError:
            raise ServerStartError(f"{self.name} ({self.url}) not ready after {limit:g} s; is the URL right?") from None
        await self._check_external()
        if self._config.share is not None and await self._is_asleep():
            await self.wake()

    async def _until_healthy(self) -> None:
        while True:
            with contextlib.suppress(*TRANSPORT_ERRORS):
                status, _ = await self.request("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
                # Ours must be alive too: while it starts, another program could have taken the port.
                if status == 200 and not self.has_ended:
                    return
            await asyncio.sleep(START_POLL_S)

    async def _first_request(self) -> None:
        """Make vLLM compile the code that only requests for log-probs need, and report an error that kills vLLM."""
        sampling = {
            "max_tokens": FIRST_TOKENS,
            "temperature": 1.0,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "detokenize": False,
        }
        payload = {
            "model": BASE_MODEL_NAME,
            "token_ids": list(range(8)),
            "request_id": f"first-{uuid.uuid4().hex[:12]}",
            "sampling_params": sampling,
        }
        try:
            status, body = await self.work("/inference/v1/generate", payload, timeout_s=EXTERNAL_START_S)
        except ServerStartError:
            raise
        except TRANSPORT_ERRORS as error:
            words = await self.own_error() or repr(error)
            raise ServerEnded(f"{self.name} broke off its first request: {words} (log: {self.log_path})") from error
        if status != 200:
            words = await self.own_error() or f"HTTP {status} {' '.join(body.split())[:300]}"
            raise ServerStartError(f"{self.name} failed its first request: {words} (log: {self.log_path})")

    async def _while_moving(self, work: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """Return the outcome of ``work()``, for which the server's processes compute.

        Raises:
            ServerEnded: the processes have ended. ServerHangs: they make no progress, or ``limit_s`` are over.
        """
        if self._process is None:
            raise ServerEnded(f"{self.name} is being replaced")
        doing, ended = asyncio.ensure_future(work()), asyncio.ensure_future(self._process.wait())
        either = asyncio.wait([doing, ended], return_when=asyncio.FIRST_COMPLETED)
        try:
            await while_moving(either, self._movement(), HANG_S, limit_s)
            if doing.done():
                return doing.result()
            raise ServerEnded(f"{self.name} ended while it {self._activity}{await self._last_words()}")
        except Stalled as stalled:
            how = f"has not moved for {HANG_S:g} s: it hangs;"
            if stalled.moves:
                how = f"is not ready after {limit_s:g} s, though it moves; raise servers.start_timeout_s or"
            raise ServerHangs(f"{self.name} {self._activity} and {how} read {self.log_path}") from stalled
        finally:
            doing.cancel()
            ended.cancel()
            await asyncio.gather(doing, ended, return_exceptions=True)

    async def _spawn(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        cpu = installed_vllm().cpu
        command = server_command(self._model, self._config, port, cpu=cpu)
        niceness = self._config.niceness if cpu else 0
        guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), str(GRACE_S), *command]
        with await asyncio.to_thread(self._open_log) as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *("nice", "-n", str(niceness), *guard),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=server_environment(self._config, self.index, self._api_key, self.log_path.parent, cpu=cpu),
            )
        if niceness:
            await _session_goes_last(self._process.pid, niceness)

    def _open_log(self) -> BinaryIO:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        return self.log_path.open("ab")

    async def _check_external(self) -> None:
        status, body = await self.request("GET", "/version", timeout_s=PROBE_TIMEOUT_S)
        version = re.search(r'"version":\s*"([^"]+)"', body)
        if status != 200 or version is None:
            raise ServerStartError(f"{self.url} does not answer /version as vLLM does (HTTP {status})")
        check_release(version[1], self.url)
        status, body = await self.request("GET", "/v1/models", timeout_s=PROBE_TIMEOUT_S)
        try:
            lengths = {card["id"]: card.get("max_model_len") for card in json.loads(body)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerStartError(f"{self.url} does not answer /v1/models as vLLM does (HTTP {status})") from error
        if BASE_MODEL_NAME not in lengths:
            raise ServerStartError(
                f"{self.url} serves {', '.join(map(str, lengths))}; start it with --served-model-name {BASE_MODEL_NAME}"
            )
        most = lengths[BASE_MODEL_NAME]
        if isinstance(most, int) and most < self._model.max_context:
            raise ServerStartError(
                f"{self.url} holds sequences of {most} tokens, and model.max_context is {self._model.max_context}; "
                "lower it, or start the server with a longer --max-model-len"
            )

    @property
    def has_ended(self) -> bool:
        """True if the server is ours and its process has ended."""
        return self._process is not None and self._process.returncode is not None

    async def own_error(self) -> str | None:
        """Return the error that ended the server, from the log since its start; None without one, or if not ours."""
        return None if self.external else await asyncio.to_thread(own_error, self.log_path, self._log_start)

    async def _last_words(self) -> str:
        if self.external:
            return ""
        last = await asyncio.to_thread(last_line, self.log_path, self._log_start)
        words = await self.own_error() or f"its log names no error and ends with {last!r}"
        return f": {words} (log: {self.log_path})"

    @property
    def sampled(self) -> bool:
        """True if the server has sampled for a client since its start."""
        return self.load.generated_tokens > FIRST_TOKENS

    def note_activity(self, doing: str) -> None:
        """Note what the server does now. ``doing`` follows the server's name in :meth:`waits_for`."""
        self._activity, self._since = doing, time.monotonic()

    def waits_for(self) -> str:
        """Return one line on this server, which is not ready: its activity, for how long, and its last error."""
        before = f" (before: {self.last_error})" if self.last_error else ""
        return f"{self.name} {self._activity}, for {time.monotonic() - self._since:.0f} s{before}"

    async def probe(self) -> str | None:
        """Refresh ``load``. Return why the server must be replaced, or None. Raises if no answer comes."""
        if self.has_ended:
            return f"{self.name} ended{await self._last_words()}"
        status, body = await self.request("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
        if status != 200:
            return f"{self.name}: /health answers {status} {' '.join(body.split())[:200]}{await self._last_words()}"
        status, body = await self.request("GET", "/metrics", timeout_s=PROBE_TIMEOUT_S)
        if status == 200:
            self.load = parse_load(body)
        return None

    async def watch(self) -> Fault:
        """Probe until the server must be replaced, and return why. A slow server need not be replaced."""
        missed, tokens = 0, 0.0
        # Its activity since its last answer, and since its last token, while the next does not come.
        unanswered: Movement | None = None
        stalled: Movement | None = None
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
                    return Fault(self.condemned)
                try:
                    reason = await self.probe()
                except TRANSPORT_ERRORS as error:
                    missed += 1
                    unanswered = unanswered or self._movement()
                    await unanswered.look()
                    gone = self.external and isinstance(error, aiohttp.ClientConnectorError)
                    if missed >= PROBES_MISSED and (gone or _hangs(unanswered, HANG_S)):
                        return Fault(f"{self.name} does not answer, {_did(unanswered)}: {error!r}", hangs=True)
                    await asyncio.sleep(0.1)
                    continue
                if reason is not None:
                    return Fault(reason, cause=await self.own_error())
                missed, unanswered = 0, None
                before, tokens = tokens, self.load.generated_tokens + self.load.prompt_tokens
                if tokens != before or self.load.running == 0:
                    stalled = None
                    continue
                stalled = stalled or self._movement()
                await stalled.look()
                if _hangs(stalled, STALL_S):
                    what = f"{self.name} has {self.load.running:g} running requests and no token"
                    return Fault(f"{what}, {_did(stalled)}", hangs=True)
        finally:
            suspected.cancel()
            if ended is not None:
                ended.cancel()

    def _movement(self) -> Movement:
        return Movement(None if self.external else self.pid, self.log_path, MOVED_S)

    async def kill(self) -> None:
        """End the process and all its descendants, within a bounded time. An external server is left alone."""
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
        """Return the server's state as plain data for /health and /metrics."""
        return {
            **{key: getattr(self, key) for key in ("name", "url", "state", "pid", "external", "restarts")},
            "last_error": self.last_error,
            **asdict(self.load),
        }
