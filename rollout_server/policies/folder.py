"""Adapters on disk: taken in bounded and checked, named by their content, kept whole or not at all.

A version lives in ``policy-v0007-<first 8 hex digits of its SHA-256>``: written under another name, synced, renamed,
never written again. So its name and its path are functions of its content. vLLM's prefix cache is keyed by that name
and path: two contents never share a key, and no cached prefix is read under other weights than it was computed with.

Beside the adapter's two files lies ``publication``, with a number that grows from publication to publication: the
version with the highest is the latest. It is written once the servers have proven the version, and removed when the
version is retired. So a version without it must not be served after a restart.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from loop_formats.run_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_digest, sync, whole_file
from model_families.base_model import BaseModel
from rollout_server.policies.adapter_check import MAX_CONFIG_BYTES, AdapterError, check_adapter

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_UPLOAD = ".upload-"
_PUBLICATION = "publication"
_NAME = re.compile(r"policy-v(\d{4,})-([0-9a-f]{8})")


@dataclass(frozen=True)
class Incoming:
    """A checked copy of an adapter that has no final name yet."""

    folder: Path
    digest: str


class PolicyFolder:
    """The folder of a node's policy versions.

    Args:
        root: the folder; on a file system that every server sees under the same path.
        source_root: a second folder from which adapters may be taken in; None for none.
        base: the base model of the adapters.
        rank_limit: their largest rank.
    """

    def __init__(self, root: Path, source_root: Path | None, base: BaseModel, rank_limit: int) -> None:
        self.root = root.resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self._source_root = source_root.resolve() if source_root is not None else None
        self._base = base
        self._rank_limit = rank_limit
        self._limits = {ADAPTER_CONFIG: MAX_CONFIG_BYTES, ADAPTER_WEIGHTS: base.max_adapter_bytes(rank_limit)}
        self._publications = 0

    def staging(self) -> Path:
        """Make a new folder for an upload, to be taken in; the caller removes it if it is left."""
        folder = self.root / f"{_UPLOAD}{uuid.uuid4().hex}"
        folder.mkdir()
        return folder

    def take_in(self, source: Path) -> Incoming:
        """Move an upload here, or copy an adapter's two files, and check them.

        Nobody else can write to an upload. From any other folder the copy is checked, so that the servers get the files
        that were checked.

        Raises:
            AdapterError: the first reason not to serve it.
        """
        try:
            source = source.resolve()
            source.is_dir()
        except (ValueError, RuntimeError, OSError) as error:  # a NUL in it, a circle of links, a name too long
            raise AdapterError(f"the path is not a folder's: {type(error).__name__}") from error
        self._check_source(source)
        folder = self.root / f".incoming-{uuid.uuid4().hex}"
        try:
            if source.parent == self.root and source.name.startswith(_UPLOAD):
                source.rename(folder)
                for name in self._limits:
                    sync(folder / name)
            else:
                folder.mkdir()
                for name, limit in self._limits.items():
                    self._copy(source / name, folder / name, limit)
            check_adapter(folder, self._base, self._rank_limit)
            return Incoming(folder, adapter_digest(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _check_source(self, source: Path) -> None:
        roots = [root for root in (self.root, self._source_root) if root is not None]
        if not any(source.is_relative_to(root) and source != root for root in roots):
            root = self._source_root
            allowed = f"policy_root, {root}" if root is not None else "none, as policy_root is not set; upload it"
            raise AdapterError(f"{source} is outside the folder from which adapters may be named: {allowed}")
        if not source.is_dir():
            raise AdapterError(f"{source} is not a folder")
        pickled = sorted(path.name for path in source.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickled:
            raise AdapterError(f"{source} holds {pickled[0]}; only safetensors weights are taken")
        for name, limit in self._limits.items():
            file = source / name
            if file.is_symlink() or not file.is_file():
                raise AdapterError(f"{source} has no plain file {name}")
            size = file.stat().st_size
            if size > limit:
                raise AdapterError(f"{name} has {size} bytes; one of this model has at most {limit}")

    def _copy(self, source: Path, target: Path, limit: int) -> None:
        left = limit
        with open(source, "rb") as reader, open(target, "wb") as writer:
            while chunk := reader.read(min(1 << 20, left + 1)):
                left -= len(chunk)
                if left < 0:
                    raise AdapterError(f"{source.name} grew beyond its limit while it was read")
                writer.write(chunk)
            writer.flush()
            sync(writer.fileno())

    def settle(self, incoming: Incoming, version: int) -> Path:
        """Give the copy its final name, durably; returns the folder, whose name is the policy's."""
        final = self.root / policy_name(version, incoming.digest)
        if final.exists():  # the same content, left by a crash; no server serves it
            shutil.rmtree(final)
        os.rename(incoming.folder, final)
        sync(self.root)
        return final

    def mark_published(self, folder: Path) -> None:
        """Note durably that the version in ``folder`` is proven and the latest: :meth:`scan` finds it from now on."""
        self._publications += 1
        with whole_file(folder / _PUBLICATION) as partial:
            partial.write_text(f"{self._publications}\n", encoding="utf-8")

    def unmark(self, folder: Path) -> None:
        """Note durably that the version in ``folder`` is not to be served after a restart."""
        with contextlib.suppress(FileNotFoundError):  # it was never published
            (folder / _PUBLICATION).unlink()
            sync(folder)

    def scan(self, most: int) -> dict[int, Path]:
        """Return the ``most`` whole versions that were published last, in that order.

        All other folders are deleted: torn, half uploaded, not proven, retired or superseded ones.
        """
        published: list[tuple[int, int, Path]] = []
        for path in self.root.iterdir():
            match, publication = _NAME.fullmatch(path.name), _read_publication(path)
            if match is not None and publication is not None and self._is_whole(path, match[2]):
                published.append((publication, int(match[1]), path))
        published.sort(reverse=True)
        self._publications = published[0][0] if published else 0
        newest: dict[int, Path] = {}
        for _, version, path in published:
            if len(newest) < most:
                newest.setdefault(version, path)
        for path in self.root.iterdir():
            if path.is_dir() and path not in newest.values():
                shutil.rmtree(path, ignore_errors=True)
        return dict(reversed(newest.items()))

    def _is_whole(self, folder: Path, digest: str) -> bool:
        try:
            check_adapter(folder, self._base, self._rank_limit)
            return adapter_digest(folder).startswith(digest)
        except (AdapterError, OSError):
            return False


def _read_publication(folder: Path) -> int | None:
    try:
        return int((folder / _PUBLICATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def policy_name(version: int, digest: str) -> str:
    """Return the name under which vLLM serves a version: unique to its content."""
    return f"policy-v{version:04d}-{digest[:8]}"
