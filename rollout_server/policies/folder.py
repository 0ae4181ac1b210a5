"""Adapters on disk: checked, named by their content, kept whole or not at all.

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
from pathlib import Path

from loop_formats.run_files import ADAPTER_FILES, adapter_digest, sync, whole_file
from model_families.base_model import BaseModel
from rollout_server.policies.adapter_check import AdapterError, check_adapter

_PUBLICATION = "publication"
_NAME = re.compile(r"policy-v(\d{4,})-([0-9a-f]{8})")


class PolicyFolder:
    """The folder of a node's policy versions.

    Args:
        root: the folder; on a file system that every server sees under the same path.
        base: the base model of the adapters.
        rank_limit: the largest rank of the adapters.
    """

    def __init__(self, root: Path, base: BaseModel, rank_limit: int) -> None:
        self.root = root.resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self._base = base
        self._rank_limit = rank_limit
        self._publications = 0

    def staging(self) -> Path:
        """Make a new folder for an upload. The caller removes the folder if it is left."""
        folder = self.root / f".upload-{uuid.uuid4().hex}"
        folder.mkdir()
        return folder

    def check(self, upload: Path) -> str:
        """Check and sync the two files of an upload, to which nobody else can write. Return their digest.

        Raises:
            AdapterError: the adapter must not be served; the message gives the first reason.
        """
        for name in ADAPTER_FILES:
            if not (upload / name).is_file():
                raise AdapterError(f"the upload has no {name}")
            sync(upload / name)
        check_adapter(upload, self._base, self._rank_limit)
        return adapter_digest(upload)

    def settle(self, upload: Path, name: str) -> Path:
        """Durably rename an upload's folder to its policy's name, and return the new folder."""
        final = self.root / name
        if final.exists():  # the same content, left by a crash; no server serves it
            shutil.rmtree(final)
        os.rename(upload, final)
        sync(self.root)
        return final

    def mark_published(self, folder: Path) -> None:
        """Note durably that the version in ``folder`` is proven and the latest. From now on :meth:`scan` finds it."""
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
    """Return the name under which vLLM serves a version; the name is unique to the version's content."""
    return f"policy-v{version:04d}-{digest[:8]}"
