"""What lies in a run's folder: which file is a log, how files of lines are read, how a file appears whole.

    <root>/collections/<id>.jsonl          one rollout per line
    <root>/collections/<id>.meta.jsonl     the request, failures and ends of the same collection
    <root>/policies/<version>/             a LoRA adapter in PEFT's format, and the number of its publication
    <root>/node.json                       where the node listens while it runs

One rule holds for files of JSON lines. A last line without its end is a write that is under way, or that a crash
cut short: readers leave it out, and the writer cuts it off when it opens the file again. A whole line that is no record
is damage, and an error that names file and line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rollout_server.rollout import Rollout

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""PEFT's names of an adapter's two files."""

COLLECTIONS = "collections"
NODE_ADDRESS = "node.json"
_LOG, _META = ".jsonl", ".meta.jsonl"


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds both files of a PEFT adapter; what is in them is not looked at."""
    return all((folder / name).is_file() for name in ADAPTER_FILES)


def adapter_digest(folder: Path) -> str:
    """SHA-256 over the two files of a PEFT adapter. OSError: one cannot be read."""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        with open(folder / name, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def node_address(root: Path, pid: int | None = None) -> str | None:
    """Where the node on ``root`` listens, as it wrote into ``node.json``; None when it is not running. A node that was
    killed leaves its address behind: with ``pid``, only what the process of this id wrote counts."""
    try:
        address = json.loads((root / NODE_ADDRESS).read_text())
    except FileNotFoundError:
        return None
    return address["url"] if pid in (None, address["pid"]) else None


def log_path(folder: Path, collection_id: str) -> Path:
    """The log of a collection's rollouts in the folder of collections."""
    return folder / f"{collection_id}{_LOG}"


def meta_path(folder: Path, collection_id: str) -> Path:
    """What else is known of the collection: its request, failures and ends."""
    return folder / f"{collection_id}{_META}"


def only_logs(paths: Iterable[Path]) -> list[Path]:
    """Those that are logs of rollouts, sorted."""
    return sorted(path for path in paths if path.name.endswith(_LOG) and not path.name.endswith(_META))


def find_logs(run: Path) -> list[Path]:
    """The logs of a run's or an evaluation's folder, sorted; or the one that ``run`` is itself."""
    return only_logs([run] if run.is_file() else run.glob(f"**/{COLLECTIONS}/*{_LOG}"))


@dataclass(frozen=True)
class Line:
    """Line ``number`` (from 1) of a file: its record, and the bytes [start, end) that it takes."""

    number: int
    start: int
    end: int
    record: dict[str, Any]


def read_lines(path: Path, start: int = 0, number: int = 1) -> Iterator[Line]:
    """The whole lines of a file of JSON objects, which may be written to meanwhile.

    Args:
        start: offset of the first line to read, and ``number`` its number: the ``end`` of a line read earlier, and one
            more than its number.

    Raises:
        ValueError: a whole line is no JSON object; names file and line.
    """
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number} is no JSON object; the file is damaged there")
            yield Line(number, start, start + len(line), record)
            start, number = start + len(line), number + 1


def read_rollouts(log: Path) -> list[Rollout]:
    """The rollouts of a collection's log, validated.

    Raises:
        ValueError: a whole line is no rollout; names file and line.
    """
    rollouts = []
    for line in read_lines(log):
        try:
            rollouts.append(Rollout.from_dict(line.record).validate())
        except ValueError as error:
            raise ValueError(f"{log}:{line.number}: {error}") from error
    return rollouts


def append_to(path: Path) -> TextIO:
    """Open a file of lines, or a new one, to write at its end; a last line that was cut short is cut off."""
    if path.exists():
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to: it becomes ``path`` when the block ends, and is removed when that raises.

    Whoever reads ``path`` finds the old content or the new one, and several processes may write at once.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that it appears whole or not at all; returns the path."""
    with whole_file(path) as partial:
        partial.write_text(text)
    return path


def write_rollouts(folder: Path, collection_id: str, rollouts: Iterable[Rollout]) -> Path:
    """Write the log of a collection, or of a part of it, into the folder of collections, which is made if need be; the
    file appears whole. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(log_path(folder, collection_id), "".join(f"{rollout.to_json()}\n" for rollout in rollouts))


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder beside ``path`` to fill: it takes the place of ``path`` when the block ends. For one writer.

    What is in it is on disk before it has its name. What an earlier writer left unfinished is removed.
    """
    partial, replaced = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.replaced.partial")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in (*partial.iterdir(), partial):
            sync(file)
        if path.exists():
            path.rename(replaced)  # removing it takes long, and a crash meanwhile would leave neither
        partial.replace(path)
        sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
