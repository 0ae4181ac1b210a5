"""An adapter on the vLLM servers: loaded, proven by its canary, and taken off again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from loop_formats.rollout import POISONED_LOGPROB
from loop_plumbing import running_time
from rollout_server.inference.router import ServerUnavailable
from rollout_server.inference.server import TRANSPORT_ERRORS, VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.inference.server_metrics import adapters_at_work
from rollout_server.policies.adapter_check import AdapterError
from rollout_server.policies.canary import Canary

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Seconds for a server that is not ours to load, or to prove, an adapter; ours may be slow."""
DRAIN_S = 10.0


class _ServerBroke(AdapterError):
    """A running server failed. The other servers show whether the server or the adapter is at fault."""


_SERVER_ERRORS = (*TRANSPORT_ERRORS, ServerUnavailable, _ServerBroke)


@dataclass
class ServedPolicy:
    """A policy version on the servers.

    ``name`` is unique to the adapter's content; its folder and requests use this name. ``canary`` proves the
    version, publishing took ``seconds``, and ``references`` counts the users.
    """

    version: int
    name: str
    folder: Path
    canary: Canary | None
    seconds: float = 0.0
    references: int = 0
    retiring: bool = False


class Placement:
    """Puts adapters on the servers of ``group``, and takes them off."""

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        self._external_load = asyncio.Lock()

    async def place(self, adapter: ServedPolicy) -> None:
        """Load and prove the adapter on every ready server.

        A server that fails while another succeeds is replaced, and gets the adapter when it comes back.

        Raises:
            AdapterError: the adapter must not be served.
            ServerUnavailable: no server could be asked.
        """
        servers = self._group.ready
        results = await asyncio.gather(*(self.load(server, adapter) for server in servers), return_exceptions=True)
        failures = {s: result for s, result in zip(servers, results, strict=True) if isinstance(result, BaseException)}
        for failure in failures.values():
            if not isinstance(failure, _SERVER_ERRORS):
                raise failure
        if len(failures) < len(servers):
            for server, failure in failures.items():
                self._group.condemn(server, f"{server.name} has no {adapter.name}: {failure!r}")
            return
        for server, failure in failures.items():
            self._group.report_failure(server)
            if isinstance(failure, _ServerBroke):
                raise failure
        why = "; ".join(str(failure) or repr(failure) for failure in failures.values()) or "none is ready"
        raise ServerUnavailable(f"no server could load {adapter.name}: {why}")

    async def load(self, server: VllmServer, adapter: ServedPolicy) -> None:
        """Load and prove the adapter on one server. Raises the errors of :meth:`place`, and transport errors."""
        # Two URLs may lead to one external server, where the loads would undo each other.
        async with self._external_load if server.external else contextlib.nullcontext():
            await self._load_and_prove(server, adapter)

    async def _load_and_prove(self, server: VllmServer, adapter: ServedPolicy) -> None:
        payload = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        status, body = await server.work("/v1/load_lora_adapter", payload, timeout_s=LOAD_TIMEOUT_S)
        if status != 200 and "already been loaded" in body:
            # An external server has it from before: the same content, but perhaps from a folder that will go away.
            await self._unload(server, adapter)
            status, body = await server.work("/v1/load_lora_adapter", payload, timeout_s=LOAD_TIMEOUT_S)
        if status != 200:
            raise await self._refusal(server, f"cannot load {adapter.name}", status, body)
        await self._prove(server, adapter)

    async def _prove(self, server: VllmServer, adapter: ServedPolicy) -> None:
        """Check the canary; without one, at least the log-probs of a few ids must be numbers."""
        token_ids = adapter.canary.token_ids if adapter.canary is not None else list(range(8))
        payload = {
            "model": adapter.name,
            "token_ids": token_ids,
            "request_id": f"canary-{uuid.uuid4().hex[:12]}",
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
        }
        status, body = await server.work("/inference/v1/generate", payload, timeout_s=LOAD_TIMEOUT_S)
        if status != 200:
            raise await self._refusal(server, f"refused the canary of {adapter.name}", status, body)
        rows = json.loads(body)["prompt_logprobs"]
        logprobs = [float(rows[i][str(token_ids[i])]["logprob"]) for i in range(1, len(token_ids))]
        if not all(POISONED_LOGPROB < value <= 1e-6 for value in logprobs):
            raise AdapterError(f"{server.name}: {adapter.name} gives log-probs that are not numbers")
        if adapter.canary is None:
            return
        objection = adapter.canary.objection([logprobs[position - 1] for position in adapter.canary.positions])
        if objection is not None:
            raise AdapterError(f"canary: {server.name} {objection}; not the same weights")

    @staticmethod
    async def _refusal(server: VllmServer, what: str, status: int, body: str) -> Exception:
        """Return the error for an answer. vLLM answers 500 both for an unusable adapter and for a dead engine."""
        answer = f"{server.name} {what}: HTTP {status} {body[:300]}"
        if status < 500:
            return AdapterError(answer)
        if await server.probe() is None:
            return _ServerBroke(answer)
        # vLLM names its error only in its log.
        return ServerUnavailable(f"{server.name} {what}: {await server.own_error() or answer}")

    async def remove(self, adapter: ServedPolicy) -> None:
        """Unload an adapter. Return when no server works with the adapter any more, or after :data:`DRAIN_S`."""
        await asyncio.gather(*(self._unload(server, adapter) for server in self._group.ready))
        await self._drain(adapter)

    async def _unload(self, server: VllmServer, adapter: ServedPolicy) -> None:
        with contextlib.suppress(*TRANSPORT_ERRORS):  # it is dying; the restarted one will not have it
            payload = {"lora_name": adapter.name}
            status, body = await server.work("/v1/unload_lora_adapter", payload, timeout_s=LOAD_TIMEOUT_S)
            if status not in (200, 404):
                logger.warning("%s did not unload %s: HTTP %d %s", server.name, adapter.name, status, body[:200])

    async def _drain(self, adapter: ServedPolicy) -> None:
        """Wait until no ready server works on a request of this adapter, such as one whose client has just gone."""
        give_up = running_time.now() + DRAIN_S
        for server in self._group.ready:
            with contextlib.suppress(*TRANSPORT_ERRORS):
                while running_time.now() < give_up:
                    _, body = await server.request("GET", "/metrics", timeout_s=DRAIN_S)
                    if adapter.name not in adapters_at_work(body):
                        break
                    await asyncio.sleep(0.1)
