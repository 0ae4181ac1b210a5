"""Policy versions as whole, merged weights: the fallback where adapters cannot be served.

Every server holds one set of weights, so there is one version at a time: the next is taken only when nobody uses the
current one. Each server is paused (which drops its KV cache), reloads from the new folder, resumes and is proven; if
any of them fails, all go back to the last good weights *before* they resume, because one generation on half-loaded
weights kills the engine.

The routes for this exist only in vLLM's development mode, and its API key does not guard them: servers of our own, on
loopback, on a machine whose other users are trusted.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import safetensors

from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import BASE_MODEL_NAME
from rollout_server.inference.server import ServerGroup, VllmServer
from rollout_server.policies.adapter_check import FLOATS, MAX_HEADER_BYTES, AdapterError, BaseModel, all_finite
from rollout_server.policies.folder import PolicyFolder
from rollout_server.policies.store import Canary, PolicyStore, ServedPolicy

RELOAD_TIMEOUT_S = 900.0
MAX_SHARDS = 1000
CHUNK_BYTES = 64 << 20


def shard_names(folder: Path) -> list[str]:
    """The safetensors files of a model's folder, sorted."""
    return sorted(path.name for path in folder.glob("*.safetensors"))


def tensor_table(file: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Name to (dtype, shape, start, end) of each tensor; start and end are bytes from the file's beginning.

    Raises AdapterError unless safetensors itself accepts the file.
    """
    try:
        with safetensors.safe_open(file, "np"):
            pass  # its header, offsets and length have been checked
    except (safetensors.SafetensorError, OSError) as error:
        raise AdapterError(f"{file.name} is not a whole safetensors file: {error}") from error
    with open(file, "rb") as reader:
        size = int.from_bytes(reader.read(8), "little")
        header = json.loads(reader.read(size))
    header.pop("__metadata__", None)
    first = 8 + size
    return {
        name: (entry["dtype"], tuple(entry["shape"]), *(first + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }


class MergedFolder(PolicyFolder):
    """Versions that are a base model's weights under other values: same tensors, shapes and dtypes, in any shards."""

    def __init__(self, root: Path, source_root: Path | None, base: BaseModel, model: ModelConfig) -> None:
        super().__init__(root, source_root, base, model.lora_rank)
        self._expected = self._describe(Path(model.path))
        self._most = sum((Path(model.path) / name).stat().st_size for name in shard_names(Path(model.path)))

    def _describe(self, folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for shard in shard_names(folder):
            for name, (dtype, shape, _, _) in tensor_table(folder / shard).items():
                if name in found:
                    raise AdapterError(f"{shard}: {name[:200]} is in two shards")
                found[name] = (dtype, shape)
        return found

    def files(self, source: Path) -> dict[str, int]:
        names = shard_names(source)
        if not names or len(names) > MAX_SHARDS:
            raise AdapterError(f"{source} holds {len(names)} safetensors files, must be 1 to {MAX_SHARDS}")
        sizes = {name: (source / name).stat().st_size for name in names}
        total, most = sum(sizes.values()), self._most + MAX_HEADER_BYTES
        if total > most:
            raise AdapterError(f"{source} has {total} bytes of weights; one of this model has at most {most}")
        return sizes

    def check(self, folder: Path) -> None:
        found = self._describe(folder)
        for name in sorted(found.keys() ^ self._expected.keys()):
            what = "is missing" if name in self._expected else "is not in the base model"
            raise AdapterError(f"tensor {name[:200]} {what}")
        for name, described in found.items():
            if described != self._expected[name]:
                raise AdapterError(f"tensor {name} is {described}, must be {self._expected[name]}")
        for shard in shard_names(folder):
            table = tensor_table(folder / shard)
            with open(folder / shard, "rb") as reader:
                for name, (dtype, _, start, end) in table.items():
                    reader.seek(start)
                    for at in range(start, end if dtype in FLOATS else start, CHUNK_BYTES):
                        if not all_finite(reader.read(min(CHUNK_BYTES, end - at)), dtype):
                            raise AdapterError(f"tensor {name} holds a NaN or an infinity")


class MergedPolicyStore(PolicyStore):
    """A :class:`PolicyStore` of merged weights; ``publish`` takes a folder of safetensors below ``policy_root``.

    Raises:
        ValueError: servers that are not our own.
    """

    def __init__(
        self,
        group: ServerGroup,
        model: ModelConfig,
        servers: ServersConfig,
        folder: str | Path,
        source_root: str | Path | None = None,
    ) -> None:
        if servers.urls is not None:
            raise ValueError("servers.weight_sync 'merged' needs servers of the node's own; remove servers.urls")
        super().__init__(group, model, servers, folder, source_root)
        self._max_live = 1

    def _open_folder(self, folder: Path, source: Path | None) -> PolicyFolder:
        return MergedFolder(folder, source, self._base, self._model)

    def _policy(self, version: int, folder: Path, canary: Canary | None) -> ServedPolicy:
        return ServedPolicy(version, folder.name, folder, canary, served_as=BASE_MODEL_NAME)

    async def _make_room(self) -> None:
        """The current version stays until the next is proven, but nobody may be using it."""
        for policy in self._live.values():
            if policy.references:
                raise AdapterError(
                    f"policy version {policy.version} is in use; merged weights change only between uses"
                )

    async def _place(self, policy: ServedPolicy) -> None:
        current = next(iter(self._live.values()), None)
        if current is not None:
            current.retiring = True  # nobody may begin with it now
        try:
            await super()._place(policy)
        except BaseException:
            await asyncio.shield(self._put_back(current))
            raise
        if current is not None:
            await self._remove(current)

    async def _put_back(self, current: ServedPolicy | None) -> None:
        """The last good weights on every server; one that cannot take them is restarted, and gets them then."""

        async def put_back(server: VllmServer) -> None:
            try:
                if current is not None:
                    await self._load(server, current)
                else:
                    await self._reload(server, Path(self._model.path))
            except Exception as error:  # whatever it is, the server's weights are unknown now
                self._group.condemn(server, f"{server.name} could not go back to the last good weights: {error}")

        await asyncio.gather(*(put_back(server) for server in self._group.ready))
        if current is not None:
            current.retiring = False

    async def _load(self, server: VllmServer, policy: ServedPolicy) -> None:
        await self._reload(server, policy.folder)
        await self._prove(server, policy)

    async def _unload(self, server: VllmServer, policy: ServedPolicy) -> None:
        """Weights stay until others take their place; the folder is not read again."""

    async def _reload(self, server: VllmServer, folder: Path) -> None:
        """Pause, reload, resume. After a failure the server stays paused."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        # Nothing of ours is in flight; a request whose client has just gone may be, and is dropped.
        for path, payload in (
            ("/pause?mode=abort&clear_cache=true", None),
            ("/collective_rpc", reload),
            ("/resume", None),
        ):
            status, body = await server.request("POST", path, payload, timeout_s=RELOAD_TIMEOUT_S)
            if status != 200:
                raise AdapterError(f"{server.name}: {path} for {folder.name}: HTTP {status} {body[:300]}")
