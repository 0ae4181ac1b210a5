"""Sends an episode's turns to vLLM servers: same server while it lives, any other with the same token ids after that.

An episode stays on one server because its prefix cache is there. A new one goes to the server of the last rollout of
its task, which has cached the opening, or, when that server has no room, to the one with most room. A dead server costs
an episode the cached prefix and the tokens of the turn under way, nothing else: another server gets the whole request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loop_formats.ids import task_of
from loop_formats.rollout import POISONED_LOGPROB
from loop_plumbing import running_time
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup

ATTEMPTS = 4
"""Most servers that may fail a request before it is given up: a request that kills servers must not kill them all."""
RETRY_PAUSE_S = 0.2
POLL_S = 2.0
LOST_S = 300.0
"""A server that has no request for so many seconds, by its counters, while we wait for its answer, has lost ours."""
MAX_ANSWER_BYTES = 64 << 20
KEEP_ALIVE_S = 2.0
POISONED_ANSWERS, POISONED_WITHIN_S = 3, 300.0
"""A server is replaced after so many bad log-probs in that time. Not in a row: where a NaN lies in one prompt's cached
blocks, the answers to other prompts are good."""

FULL_KV = 0.9
"""A server whose KV cache is so full gets no episode for the sake of its cached prefix, which it evicts next."""
UNEVEN = 1.25
"""Nor does a server that has all episodes it samples at a time, and so many times an equal share of them."""
MAX_REMEMBERED_TASKS = 10_000


class ServerUnavailable(RuntimeError):
    """No server completed the request within the allowed attempts or before the deadline."""


class RequestRefused(ValueError):
    """A server refused the request itself, for example as too long. Other servers would refuse it, too."""


class BadLogprob(RuntimeError):
    """Sampled log-probs are impossible, as from NaN in the KV cache or the weights. The tokens are unusable."""


class _ServerFailed(Exception):
    """An attempt at a request failed because of the server."""


@dataclass(frozen=True)
class Generation:
    """The result of a request for tokens.

    ``token_ids`` and ``logprobs`` are [n]; if ``finish_reason`` is "stop", the last token is the stop token.
    ``logprobs`` are of the distribution sampled from. ``cached_tokens`` counts prompt tokens from the prefix cache.
    ``seconds`` is the time from the call to the answer, including failed attempts.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    server: str
    cached_tokens: int
    seconds: float


@dataclass
class RouterCounters:
    """Totals since the node's start, for /metrics."""

    requests: int = 0
    failed_attempts: int = 0
    moved_episodes: int = 0
    bad_logprobs: int = 0


@dataclass
class _OwnWork:
    """The router's view of its own work on one server."""

    episodes: set[str] = field(default_factory=set)
    poisoned_at: deque[float] = field(default_factory=deque)


class Router:
    """Chooses servers and sends requests. Use :meth:`start` and :meth:`close`, or ``async with``."""

    def __init__(self, group: ServerGroup, max_num_seqs: int) -> None:
        self._group = group
        self._slots = max_num_seqs
        self._own_work_by_server: dict[str, _OwnWork] = {}
        self._pinned: dict[str, VllmServer] = {}
        self._homes: dict[str, VllmServer] = {}
        self._session: aiohttp.ClientSession | None = None
        self._asking = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.counters = RouterCounters()

    async def start(self) -> None:
        # vLLM closes a connection that was idle for 5 s, and a POST at that moment looks like a dead server: we close
        # it long before.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        """Close all connections; vLLM then aborts the requests on these connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Router:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _own_work(self, server: VllmServer) -> _OwnWork:
        return self._own_work_by_server.setdefault(server.name, _OwnWork())

    def crowding(self, server: VllmServer) -> float:
        """Return how full a server is; 1 is about full. Our own episodes count exactly and immediately.

        The load from /metrics is up to two seconds old, but includes others' requests and the KV cache, which runs out
        first with long contexts. Waiting requests count double: they show that something has run out already.
        """
        occupied = max(len(self._own_work(server).episodes), server.load.running)
        return (occupied + 2 * server.load.waiting) / self._slots + server.load.kv_usage

    def _choose(self, episode_id: str, avoid: Iterable[str]) -> VllmServer | None:
        """Return the episode's server, else its task's server if that has room, else the ready server with most room.
        Servers in ``avoid`` are chosen only if there is no other."""
        ready = self._group.ready
        if not ready:
            return None
        candidates = [server for server in ready if server.name not in set(avoid)] or ready
        pinned = self._pinned.get(episode_id)
        if pinned in candidates:
            return pinned
        task, home = task_of(episode_id), self._homes.pop(task_of(episode_id), None)
        if home in candidates and self._has_room(home):
            chosen = home
        else:
            chosen = min(candidates, key=lambda s: (self.crowding(s), len(self._own_work(s).episodes), s.index))
        if task:
            self._homes[task] = chosen
            if len(self._homes) > MAX_REMEMBERED_TASKS:
                del self._homes[next(iter(self._homes))]
        if pinned is not None:
            self.counters.moved_episodes += 1
        self.release(episode_id)
        self._pinned[episode_id] = chosen
        self._own_work(chosen).episodes.add(episode_id)
        return chosen

    def _has_room(self, server: VllmServer) -> bool:
        """Return whether this server, which knows the episode's task, is a better choice than an emptier server."""
        load, episodes = server.load, len(self._own_work(server).episodes)
        most = max(self._slots, UNEVEN * len(self._pinned) / len(self._group.ready))
        return not load.waiting and load.kv_usage < FULL_KV and max(episodes, load.running) < most

    def release(self, episode_id: str) -> None:
        """Forget which server an ended episode used. An unknown id is ignored."""
        server = self._pinned.pop(episode_id, None)
        if server is not None:
            self._own_work(server).episodes.discard(episode_id)

    async def drain(self, seconds: float) -> None:
        """Wait until no server works for us, at most ``seconds``. New requests wait until a server is ready."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()

    async def generate(
        self,
        *,
        episode_id: str,
        token_ids: Sequence[int],
        model: str,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
        stop_token_ids: Sequence[int],
        deadline: float,
        stops: Sequence[str] = (),
    ) -> Generation:
        """Sample up to ``max_tokens`` after ``token_ids`` from the policy named ``model``, which the store serves.

        A working server may take any time. The group replaces a server that hangs, and the request then goes to
        another. ``deadline``, in seconds of ``time.monotonic()``, is the last resort. Cancelling the call closes the
        connection; vLLM then aborts the request and frees its KV cache.

        Only ``stop_token_ids`` and the texts ``stops`` end the generation. vLLM alone would also stop at the end ids in
        the model's folder, which a chat format may not know.

        Raises:
            ServerUnavailable: servers failed the request :data:`ATTEMPTS` times, or the deadline came.
            RequestRefused: a server refused the request itself.
            BadLogprob: a sampled log-prob is not a number, above 0, or at most :data:`POISONED_LOGPROB`.
        """
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,
            "stop": list(stops),
            "detokenize": bool(stops),
            "skip_special_tokens": False,
        }
        body = {"model": model, "token_ids": list(token_ids), "sampling_params": sampling}
        started = time.monotonic()
        last: Exception | None = None
        avoid: list[str] = []
        self.counters.requests += 1
        try:
            async with asyncio.timeout(deadline - started):
                while len(avoid) < ATTEMPTS:
                    server = self._choose(episode_id, avoid)
                    if server is None:
                        await self._group.wait_for_change()
                        continue
                    try:
                        return await self._while_at_work(server, self._ask(server, episode_id, body, started))
                    except _ServerFailed as error:
                        last = error
                    self.counters.failed_attempts += 1
                    self._group.report_failure(server)
                    avoid.append(server.name)
                    await asyncio.sleep(RETRY_PAUSE_S * 2 ** (len(avoid) - 1))
        except TimeoutError:
            passed = f"{episode_id}: no answer after {time.monotonic() - started:.1f} s"
            cause = f"; last failure: {last}" if last is not None else ""
            none_ready = "" if self._group.ready else "; no vLLM server is ready"
            raise ServerUnavailable(f"{passed}{none_ready}{cause}") from None
        raise ServerUnavailable(f"{episode_id}: gave up after {ATTEMPTS} attempts; last failure: {last}")

    async def _while_at_work(self, server: VllmServer, asking: Coroutine[Any, Any, Generation]) -> Generation:
        """Wait for the answer while the server is ready, unless it reports for too long that it has nothing to do.

        Raises:
            _ServerFailed: the answer will not come.
        """
        answer, load, idle_since = asyncio.ensure_future(asking), server.load, None
        self._asking += 1
        self._quiet.clear()
        try:
            while not (await asyncio.wait([answer], timeout=POLL_S))[0]:
                now = running_time.now()
                if server.state != "ready":
                    raise _ServerFailed(f"{server.name} is {server.state}")
                if server.load is load:  # no new report has come
                    continue
                load = server.load
                if load.running or load.waiting:
                    idle_since = None
                elif now - (idle_since := idle_since or now) > LOST_S:
                    raise _ServerFailed(f"{server.name} lost the request: it has had nothing to do for {LOST_S:g} s")
            return answer.result()
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            self._asking -= 1
            if not self._asking:
                self._quiet.set()

    async def _ask(self, server: VllmServer, episode_id: str, body: dict, started: float) -> Generation:
        if self._session is None:
            raise RuntimeError("the router is not started")
        try:
            async with self._session.post(
                f"{server.url}/inference/v1/generate",
                json={**body, "request_id": f"{episode_id}-{uuid.uuid4().hex[:12]}"},
                headers=server.headers,
                max_line_size=1 << 16,
            ) as answer:
                status, raw = answer.status, await answer.content.read(MAX_ANSWER_BYTES)
                while not answer.content.at_eof() and len(raw) < MAX_ANSWER_BYTES:
                    raw += await answer.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise _ServerFailed(f"{server.name}: {type(error).__name__}: {error}") from error
        if status >= 500 or status == 429:
            raise _ServerFailed(f"{server.name}: HTTP {status}: {raw[:300].decode(errors='replace')}")
        if status == 404:
            # The store has this version on every server. One that lost it would fail at once, be the emptiest, and get
            # the next episodes.
            self._group.condemn(server, f"{server.name} does not know {body['model']}, which was proven there")
            raise _ServerFailed(f"{server.name}: HTTP {status}: {raw[:300].decode(errors='replace')}")
        if status != 200:
            raise RequestRefused(f"{server.name}: HTTP {status}: {raw[:500].decode(errors='replace')}")
        return self._parse(server, raw, time.monotonic() - started)

    def _note_poisoned(self, server: VllmServer) -> None:
        times, now = self._own_work(server).poisoned_at, time.monotonic()
        times.append(now)
        while times[0] < now - POISONED_WITHIN_S:
            times.popleft()
        if len(times) >= POISONED_ANSWERS:
            times.clear()
            within = f"{POISONED_ANSWERS} bad log-probs within {POISONED_WITHIN_S:g} s"
            self._group.condemn(server, f"{server.name} returned {within}")

    def _parse(self, server: VllmServer, raw: bytes, seconds: float) -> Generation:
        try:
            answer = json.loads(raw)
            choice = answer["choices"][0]
            token_ids = [int(token) for token in choice["token_ids"]]
            content = choice["logprobs"]["content"]
            sampled = [int(entry["token_id"]) for entry in content]
            logprobs = [float(entry["logprob"]) for entry in content]
            usage = answer.get("usage") or {}
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            finish_reason = choice["finish_reason"]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise _ServerFailed(f"{server.name}: unreadable answer {raw[:200]!r} ({error!r})") from error
        if finish_reason not in ("stop", "length"):
            raise _ServerFailed(f"{server.name}: the request ended with {finish_reason!r}")
        if sampled != token_ids or not token_ids:
            raise _ServerFailed(f"{server.name}: {len(token_ids)} token ids, log-probs for {len(sampled)}")
        # "not >" and not "<=", so that NaN is caught as well.
        wrong = next((value for value in logprobs if not POISONED_LOGPROB < value <= 1e-6), None)
        if wrong is not None:
            self.counters.bad_logprobs += 1
            self._note_poisoned(server)
            raise BadLogprob(f"{server.name}: sampled log-prob {wrong}; its KV cache or the weights hold a NaN")
        return Generation(token_ids, logprobs, finish_reason, server.name, cached, seconds)
