"""Policy versions: checked, loaded on every server, proven there, served, retired. One change at a time.

The adapter of a version has a name and a folder of its own (:mod:`rollout_server.policies.folder` has the reason).
While it is loaded and proven, and if that fails, the node goes on serving the earlier versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loop_formats.schema import from_mapping, require
from model_families.base_model import BaseModel
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.router import ServerUnavailable
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.policies.adapter_check import AdapterError
from rollout_server.policies.canary import Canary
from rollout_server.policies.folder import PolicyFolder, policy_name
from rollout_server.policies.placement import Placement, ServedPolicy

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 120.0
"""Seconds that a publication waits for a version in use. The episodes that an early stop aborts may need a minute to
close their worlds."""
READY_TIMEOUT_S = 30.0
"""Seconds that a publication waits for a server before it refuses with the servers' states; the client asks again."""
_END_USERS = "end the collections (rollout-server cancel) and the agents' keys (DELETE /v1/keys/KEY) that use"


class UnknownPolicy(LookupError):
    """A version that is not served (any more)."""


class StillInUse(RuntimeError):
    """The servers have no room for a version, since one that is being retired is still in use. Try again later."""


class PolicyStore:
    """The policy versions being served. Only one change is made at a time.

    Args:
        group: the servers; each gets the live versions again whenever it comes up.
        folder: the folder of the versions; on a file system that every server sees under the same path.

    Raises:
        ValueError: the base model has an unknown architecture.
    """

    def __init__(self, group: ServerGroup, model: ModelConfig, servers: ServersConfig, folder: Path) -> None:
        self._group = group
        self._placement = Placement(group)
        self._model = model
        self._max_live = servers.max_loras
        self._base = BaseModel.read(model.path)
        self._folder = PolicyFolder(folder, self._base, model.lora_rank)
        self._live: dict[int, ServedPolicy] = {}
        self._change = asyncio.Lock()
        self._changed = asyncio.Event()
        self._retirements: set[asyncio.Task[None]] = set()
        group.on_ready = self.on_server_ready

    @property
    def max_adapter_bytes(self) -> int:
        """The size in bytes of this model's largest possible adapter weights file; a bound for uploads."""
        return self._base.max_adapter_bytes(self._model.lora_rank)

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the base model can sample."""
        return self._base.vocabulary

    def staging(self) -> Path:
        """Make a new folder for an upload's two files, for :meth:`publish`. The caller removes the folder."""
        return self._folder.staging()

    def versions(self) -> list[int]:
        """Return the versions that new episodes may use, in ascending order."""
        return sorted(version for version, policy in self._live.items() if not policy.retiring)

    def users(self) -> dict[int, int]:
        """Return the number of users (collections, keys, single turns) of each version that the servers hold, including
        versions that are being retired."""
        return {version: policy.references for version, policy in sorted(self._live.items())}

    def latest(self) -> int:
        """Return the version published last. Raises UnknownPolicy if there is none.

        It need not be the highest: a run that went back to an earlier checkpoint publishes lower versions again.
        """
        policy = self._latest()
        if policy is None:
            raise UnknownPolicy("no policy version has been published; publish one first")
        return policy.version

    def _latest(self) -> ServedPolicy | None:
        return next((policy for policy in reversed(self._live.values()) if not policy.retiring), None)

    def _get(self, version: int) -> ServedPolicy:
        if version not in self._live:
            served = ", ".join(map(str, self.versions())) or "none"
            raise UnknownPolicy(f"policy version {version} is not served; served: {served}")
        return self._live[version]

    def acquire(self, version: int) -> str:
        """Count one more user of ``version``, and return the version's name. A version with users is not removed."""
        policy = self._get(version)
        if policy.retiring:
            raise UnknownPolicy(f"policy version {version} is being retired")
        policy.references += 1
        return policy.name

    def release(self, version: int) -> None:
        """Count one user less. When the last user of a retiring version leaves, the version is removed."""
        policy = self._get(version)
        if policy.references == 0:
            raise RuntimeError(f"policy version {version} was released more often than acquired")
        policy.references -= 1
        if policy.references == 0:
            self._notify()
        if policy.retiring and policy.references == 0:
            task = asyncio.get_running_loop().create_task(self._retire_unused(policy))
            self._retirements.add(task)
            task.add_done_callback(self._retirements.discard)

    async def publish(self, version: int, upload: Path, canary: Mapping[str, Any] | None = None) -> ServedPolicy:
        """Check an adapter, load and prove it on all servers, then serve it. On failure earlier versions stay served.

        ``upload`` is a folder of :meth:`staging`, or another on that file system; it becomes the policy's folder.
        Publishing the same content again under the same version only makes it the latest; other content replaces a
        version that nobody uses, under another name. A publication waits for a version in use that has to go, for up to
        :data:`RELEASE_TIMEOUT_S`. ``canary`` is a mapping of :class:`Canary`'s fields.

        Raises:
            ConfigError: the canary's fields are invalid.
            AdapterError: the adapter or its canary must not be served, or versions stayed in use that nobody retires;
                nothing was changed.
            StillInUse: a version that is being retired stayed in use; try again.
            ServerUnavailable: no server could be asked; try again.
        """
        started = time.monotonic()
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise AdapterError(f"policy version {version!r} must be a whole number from 0")
        proof, most = None if canary is None else from_mapping(Canary, canary, "canary"), self._model.max_context
        require(proof is None or len(proof.token_ids) < most, f"canary.token_ids must be fewer than {most}")
        name = policy_name(version, await asyncio.to_thread(self._folder.check, upload))
        await self.wait_for_server()
        return await self._publish(version, upload, name, proof, started)

    async def _publish(
        self, version: int, upload: Path, name: str, canary: Canary | None, started: float
    ) -> ServedPolicy:
        give_up = asyncio.get_running_loop().time() + RELEASE_TIMEOUT_S
        refusal: Exception | None = None
        while True:
            async with self._change:
                policy = self._live.get(version)
                if policy is not None and policy.name == name:
                    policy.canary = canary or policy.canary  # a restart forgets it, and a server that wakes is asked
                    await self._make_latest(policy)
                    return policy
                try:
                    replaced = self._to_replace(version)
                except (AdapterError, StillInUse) as error:
                    if refusal is None:
                        logger.info("policy version %d waits for up to %g s: %s", version, RELEASE_TIMEOUT_S, error)
                    refusal, changed = error, self._changed
                else:
                    with self._set_aside(replaced):
                        folder = await asyncio.to_thread(self._folder.settle, upload, name)
                        policy = ServedPolicy(version, name, folder, canary)
                        await self._serve(policy)
                    if replaced is not None:
                        await self._remove(replaced)
                    policy.seconds = time.monotonic() - started
                    logger.info("policy version %d (%s) is served after %.2f s", version, name, policy.seconds)
                    return policy
            # Without the lock: versions can be retired, and servers come back, while this waits.
            try:
                async with asyncio.timeout_at(give_up):
                    await changed.wait()
            except TimeoutError:
                raise refusal from None

    async def _serve(self, policy: ServedPolicy) -> None:
        try:
            await self._placement.place(policy)
            await self._make_latest(policy)
        except BaseException:
            await asyncio.shield(self._discard(policy))
            raise

    async def _make_latest(self, policy: ServedPolicy) -> None:
        """Make a version the latest, first on disk: a client that knows the version finds it after a restart."""
        await asyncio.to_thread(self._folder.mark_published, policy.folder)
        policy.retiring = False
        self._live.pop(policy.version, None)
        self._live[policy.version] = policy
        self._notify()

    def _notify(self) -> None:
        """Make waiting publications check again whether a version can be removed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_server(self) -> None:
        """Wait until a server is ready. Raises ServerUnavailable after :data:`READY_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not self._group.ready:
                    await self._group.wait_for_change()
        except TimeoutError:
            states = "; ".join(self._group.waits_for())
            raise ServerUnavailable(f"no vLLM server is ready after {READY_TIMEOUT_S:g} s: {states}") from None

    def _to_replace(self, version: int) -> ServedPolicy | None:
        """Return the policy to remove once ``version`` is proven: the same version with other content or, if the
        servers are full, the oldest unused version.

        If all candidates are in use, raises StillInUse if one is being retired, else AdapterError.
        """
        latest = self._latest()
        if version in self._live:
            candidates = [self._live[version]]
            reason = f"policy version {version} is in use with other content; {_END_USERS} it"
        elif len(self._live) < self._max_live:
            return None
        else:
            # In the order of publication; the latest stays, to be sampled from until the new one is proven.
            candidates = [policy for policy in self._live.values() if policy is not latest]
            in_use = ", ".join(str(policy.version) for policy in candidates if policy.references)
            beside = f" beside the latest ({latest.version})" if latest is not None else ""
            cure = f"{_END_USERS} one of them, or raise servers.max_loras"
            reason = f"policy versions in use ({in_use}) leave no place for version {version}{beside}; {cure}"
        for policy in candidates:
            if policy.references == 0:
                return policy
        raise (StillInUse if any(policy.retiring for policy in candidates) else AdapterError)(reason)

    @contextlib.contextmanager
    def _set_aside(self, policy: ServedPolicy | None) -> Iterator[None]:
        """Let nobody begin to use ``policy`` within the block. If the block raises, the policy is served as before.

        The servers hold the policy meanwhile, perhaps as one adapter above ``max_loras``. vLLM allows that while nobody
        samples from it. Only requests for more than ``max_loras`` adapters wait, without a message.
        """
        served = dict(self._live)
        if policy is not None:
            del self._live[policy.version]
        try:
            yield
        except BaseException:
            self._live = served
            raise

    async def settled(self) -> None:
        """Wait until no version is being loaded, proven or removed any more."""
        async with self._change:
            pass

    async def on_server_ready(self, server: VllmServer) -> None:
        """Load and prove the live versions on a server that has just started or woken. Raises if that fails."""
        async with self._change:
            for policy in self._live.values():
                await self._placement.load(server, policy)

    async def retire(self, version: int) -> bool:
        """Serve no new episode with ``version``, now or after a restart. Remove the version after its last user.

        Return whether the version is gone already. Raises UnknownPolicy if the version is not served.
        """
        async with self._change:
            policy = self._get(version)
            policy.retiring = True
            self._notify()
            await asyncio.to_thread(self._folder.unmark, policy.folder)
            if policy.references == 0:
                await self._remove(policy)
            return version not in self._live

    async def _retire_unused(self, policy: ServedPolicy) -> None:
        async with self._change:
            # It may have been published again, or removed, while this waited.
            if policy.retiring and policy.references == 0 and self._live.get(policy.version) is policy:
                await self._remove(policy)

    async def _remove(self, policy: ServedPolicy) -> None:
        """Unload the policy, wait for its requests, then delete its folder: vLLM dies if a request lacks the folder."""
        if self._live.get(policy.version) is policy:
            del self._live[policy.version]
            self._notify()
        await self._discard(policy)
        logger.info("policy version %d (%s) is retired", policy.version, policy.name)

    async def _discard(self, policy: ServedPolicy) -> None:
        # First, so that a node that dies in the middle of this does not serve it again.
        await asyncio.to_thread(self._folder.unmark, policy.folder)
        await self._placement.remove(policy)
        await asyncio.to_thread(shutil.rmtree, policy.folder, ignore_errors=True)

    async def restore(self) -> list[int]:
        """Serve the last published versions again, and return them. To be called on a restart, before servers start.

        These versions were proven before they were marked as published, and their names stand for their content. So
        their canaries are not kept.
        """
        async with self._change:
            for version, folder in (await asyncio.to_thread(self._folder.scan, self._max_live)).items():
                self._live[version] = ServedPolicy(version, folder.name, folder, None)
        return self.versions()
