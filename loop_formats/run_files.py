"""The files of a run's folder: finds logs, reads files of lines, and writes files that appear whole.

    <root>/collections/<id>.jsonl          one rollout per line
    <root>/collections/<id>.meta.jsonl     the request, failures and ends of the same collection
    <root>/collections/<id>.held           its finished episodes that are graded once their group is there
    <root>/policies/<version>/             a LoRA adapter in PEFT's format, and the number of its publication
    <root>/node.json                       the node's address while it runs
    <root>/node.secret                     its secret, for its owner, where a run started it

One rule holds for files of JSON lines. A last line without its end is a write that is under way, or that a crash
cut short: readers leave it out, and the writer cuts it off when it opens the file again. A whole line that is not a
record is damage, and an error that names file and line. A blank line is one that was damaged and has been set aside; it
counts as a line and is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from loop_formats.folder_lock import is_locked
from loop_formats.rollout import MOST_IDS, Rollout

DAMAGE_CURE = "make the line blank to leave it out and keep the others"

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""PEFT's names of an adapter's two files."""
_SETS_NOTHING = frozenset(
    {"base_model_name_or_path", "_name_or_path", "name_or_path", "revision", "transformers_version", "peft_version"}
)

COLLECTIONS = "collections"
NODE_ADDRESS = "node.json"
NODE_LOCK = "node.lock"
NODE_SECRET = "node.secret"
"""The lock that a node holds on a folder as long as it runs."""
_LOG, _META = ".jsonl", ".meta.jsonl"
STREAM_FILE = "stream.jsonl"
"""The groups that a run with ``collection.stream`` opened and took (:mod:`loop_recipes.rollouts.stream`)."""
_NUMBER = re.compile(r"([0-9]+)")
_SUMS = "SHA256SUMS"
_REPLACED = ".replaced.partial"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Arguments of Linux's renameat2."""
_REFUSED = {
    *(errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOTTY),
    *(errno.EPERM, errno.EACCES, errno.EBADF, errno.EISDIR),
}
"""Errors with which SMB, FUSE and 9p refuse a call that they lack, or lack for folders and files open for reading."""
logger = logging.getLogger(__name__)


def is_adapter(folder: Path) -> bool:
    """Return whether the folder holds both files of a PEFT adapter; their content is not checked."""
    return all((folder / name).is_file() for name in ADAPTER_FILES)


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 of a PEFT adapter's settings and weights, without the base model's path; raises OSError."""
    digest = hashlib.sha256(settings_of(folder / ADAPTER_CONFIG))
    with open(folder / ADAPTER_WEIGHTS, "rb") as file:
        hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def settings_of(file: Path) -> bytes:
    """Return the settings in a config file, without names, paths and versions; the whole content if it is not JSON."""
    content = file.read_bytes()
    try:
        settings = {key: value for key, value in json.loads(content).items() if key not in _SETS_NOTHING}
        return json.dumps(settings, sort_keys=True).encode()
    except (ValueError, AttributeError, RecursionError):
        return content


def node_address(root: Path, pid: int | None = None) -> str | None:
    """Return the URL of the node on ``root`` from ``node.json``; None if no node runs. A node that was killed leaves
    its address behind. So with ``pid``, an address counts only if this process wrote it; without ``pid``, only while a
    node holds the folder's lock: a copied folder must not choose who receives the reader's token. A file that a power
    cut left empty or full of zeros holds no address."""
    if pid is None and not is_locked(root, NODE_LOCK):
        return None
    try:
        match json.loads((root / NODE_ADDRESS).read_text(encoding="utf-8")):
            case {"url": str(url), "pid": written} if pid in (None, written):
                return url
    except (FileNotFoundError, ValueError):
        pass
    return None


def new_node_secret(root: Path) -> str:
    """Make and return the secret of a node that a run starts on ``root``; only the owner can read its file."""
    root.mkdir(parents=True, exist_ok=True)
    (root / NODE_SECRET).unlink(missing_ok=True)
    secret = secrets.token_hex(16)
    with open(os.open(root / NODE_SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secret)
    return secret


def log_path(folder: Path, collection_id: str) -> Path:
    """Return the path of a collection's log of rollouts in the folder of collections."""
    return folder / f"{collection_id}{_LOG}"


def meta_path(folder: Path, collection_id: str) -> Path:
    """Return the path of a collection's meta file, which holds the request, the failures and the ends."""
    return folder / f"{collection_id}{_META}"


def held_path(folder: Path, collection_id: str) -> Path:
    """Return the path of the file of a collection's episodes whose group is not graded yet, one a line."""
    return folder / f"{collection_id}.held"


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Sort paths by name, numbers in names as numbers: iteration 10000 comes after 9999."""

    def key(path: Path) -> list[list[str | int]]:
        pieces = (enumerate(_NUMBER.split(name)) for name in path.parts)  # text and number take turns
        return [[int(piece) if place % 2 else piece for place, piece in name] for name in pieces]

    return sorted(sorted(paths), key=key)


def newest_adapter(run: Path) -> Path | None:
    """Return the folder of the last adapter that a training run exported to its ``policies``; None if there is none."""
    return next((path for path in reversed(in_order(run.glob("policies/policy-v*"))) if is_adapter(path)), None)


def only_logs(paths: Iterable[Path]) -> list[Path]:
    """Return the logs of rollouts among the paths, in order."""
    named = (path for path in paths if path.name.endswith(_LOG) and not path.name.endswith(_META))
    return in_order(path for path in named if path.name != STREAM_FILE)


def find_logs(run: Path) -> list[Path]:
    """Return the logs in the folder of a run or an evaluation, in order; or ``run`` itself if it is a log.

    Links to folders are followed, because a node's folder may lie on another disk. A folder with several names is read
    once.
    """
    if run.is_file():
        return only_logs([run])
    logs, seen = [], set()
    for name, folders, files in os.walk(run, followlinks=True):
        folder, real = Path(name), os.path.realpath(name)
        known = real in seen or {"datasets", "tasks"} <= set(folders)  # of AppWorld: thousands of folders, and no log
        seen.add(real)
        folders[:] = [] if known else sorted(folders)
        if not known and folder.name == COLLECTIONS and folder != run:
            logs += [folder / file for file in files]
    return only_logs(logs)


@dataclass(frozen=True)
class Line:
    """The JSON object in line ``number`` (from 1) of a file."""

    number: int
    record: dict[str, Any]


@dataclass(frozen=True)
class WholeLine:
    """Line ``number`` (from 1) of a file: its bytes, of which the first has the offset ``start``."""

    number: int
    start: int
    text: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def is_blank(line: bytes) -> bool:
    """Return whether a line of a file of JSON lines was blanked out."""
    return not line.strip()


def whole_lines(path: Path, start: int = 0, number: int = 1) -> Iterator[WholeLine]:
    """Yield the whole lines of a file without the blank lines; a process may be writing the file.

    Args:
        start: byte offset of the first line to read, ``number`` that line's number. After a line read earlier these are
            its ``end`` and its ``number`` + 1.
    """
    with path.open("rb") as file:
        file.seek(start)
        for text in file:
            if not text.endswith(b"\n"):
                return
            line = WholeLine(number, start, text)
            if not is_blank(text):
                yield line
            start, number = line.end, number + 1


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the whole lines of a file of JSON objects; a process may be writing the file.

    Raises:
        ValueError: a whole line is not a JSON object; the message names file and line.
    """
    for line in whole_lines(path):
        try:
            record = json.loads(line.text)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{line.number} is not a JSON object; the file is damaged there: {DAMAGE_CURE}")
        yield Line(line.number, record)


def read_rollouts(log: Path, vocabulary: int = MOST_IDS) -> list[Rollout]:
    """Return the rollouts of a collection's log, validated, for a model of ``vocabulary`` token ids.

    Raises:
        ValueError: a whole line is not a rollout; the message names file and line.
    """
    rollouts = []
    for line in read_lines(log):
        try:
            rollouts.append(Rollout.from_dict(line.record).validate(vocabulary))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            typed = "" if isinstance(error, ValueError) else "a field is of another type: "
            raise ValueError(f"{log}:{line.number}: {typed}{error}") from error
    return rollouts


class WriteFailed(RuntimeError):
    """A file of a run could not be written; the message is one line."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an error of one line if the block fails to write ``path``.

    Raises:
        WriteFailed: the disk is full or broken, or its file system lacks a necessary call.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        cure = "free some space there" if re.search("space|quota", str(reason)) else "have it take files, or move them"
        cure += " and start the same again (a training run with resume_from_checkpoint=True)"
        raise WriteFailed(f"cannot write {path}: {reason}; {cure}: nothing that was finished is lost") from error


def append_to(path: Path) -> TextIO:
    """Open a file of lines, old or new, to write at its end; remove the last line if it is incomplete."""
    if path.exists():
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. At the block's end the file becomes ``path``; after an error it is removed.

    Readers of ``path`` find the old or the new content, also after a power cut. Several processes may write at once.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that it appears whole or not at all; returns the path."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def to_json(value: Any, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return JSON that every reader accepts: a number that is not finite becomes null, and half a surrogate pair
    becomes an escape."""
    try:
        return json.dumps(value, indent=indent, separators=separators, allow_nan=False)
    except ValueError:  # checking each number first would take as long again
        return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def write_rollouts(folder: Path, collection_id: str, rollouts: Iterable[Rollout]) -> Path:
    """Write the log of a collection, or a part of the log, into the folder of collections; make the folder if it is
    missing. The file appears whole. Returns the log's path."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(log_path(folder, collection_id), "".join(f"{rollout.to_json()}\n" for rollout in rollouts))


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill; when the block ends, this folder replaces ``path``. Only one process may write.

    All files are on disk before the folder gets its name. They become as readable as the folder, because safetensors
    lets only the owner read its files. An earlier writer's unfinished folder is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    bring_back(path.parent)
    partial, replaced = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}{_REPLACED}")
    for leftover in (partial, replaced):
        remove_folder(leftover)
    partial.mkdir()
    try:
        yield partial
        readable = partial.stat().st_mode & 0o666
        for file in partial.iterdir():
            if file.is_file():
                with _where_taken("chmod", "files keep the rights that it gives them"):
                    file.chmod(readable)
        for file in (*partial.iterdir(), partial):
            sync(file)
        if not path.exists():
            partial.rename(path)
        elif not _exchange(partial, path):
            path.rename(replaced)  # removing it takes long, and a crash meanwhile would leave neither
            partial.rename(path)
        sync(path.parent)
        remove_folder(replaced)
    finally:
        remove_folder(partial)


def remove_folder(path: Path) -> OSError | None:
    """Remove a folder with its content, or a link to a folder. Returns the error that prevented it, or None: a network
    file system may keep a file that is open elsewhere until later."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder with all its subfolders to a new one. The files there have the usual rights. A link becomes a copy
    of its target."""
    for name, _, files in os.walk(source, followlinks=True):
        folder = target / os.path.relpath(name, source)
        folder.mkdir(parents=True)
        for file in files:
            shutil.copyfile(os.path.join(name, file), folder / file)


def folders_in(parent: Path) -> dict[str, Path]:
    """Return name -> path of the whole folders in ``parent``. If :func:`whole_folder` was killed after it had moved the
    old folder aside and before the new folder was in its place, the old folder is returned."""
    paths = list(parent.glob("*"))
    replaced = {path.name[1:].removesuffix(_REPLACED): path for path in paths if path.name.endswith(_REPLACED)}
    return replaced | {path.name: path for path in paths if not path.name.startswith(".")}


def bring_back(parent: Path) -> None:
    """Rename the folders in ``parent`` to the names that :func:`folders_in` returns. Only one process may do this."""
    for name, path in folders_in(parent).items():
        if path.name != name:
            path.rename(parent / name)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; return False if the file system cannot do that."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    names = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return swap is not None and swap(*names, _RENAME_EXCHANGE) == 0


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of every file in ``folder`` into its ``SHA256SUMS``, as sha256sum does."""
    lines = [f"{_sha256(file)}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / _SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """Compare the files of ``folder`` with its ``SHA256SUMS``, if this file exists.

    Raises:
        ValueError: a file has changed; the message names the file.
        OSError: a file cannot be read.
    """
    file = folder / _SUMS
    for line in file.read_text(errors="replace", encoding="utf-8").splitlines() if file.exists() else ():
        digest, _, name = line.partition("  ")
        if name and _sha256(folder / name) != digest:
            raise ValueError(f"{name} is not as it was written")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sync(what: Path | int) -> None:
    """Write a file's content (by its path or descriptor), or a folder's list of names, to disk; goes on, with one
    warning, where the file system has no fsync."""
    with _where_taken("fsync", "what is written there may be lost in a power cut"):
        descriptor = what if isinstance(what, int) else os.open(what, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            if descriptor != what:
                os.close(descriptor)


@contextlib.contextmanager
def _where_taken(call: str, without: str) -> Iterator[None]:
    """Ignore, with a warning, that the file system does not support ``call``; a full or broken disk is an error."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _warn_once(f"a file system refuses {call} ({error.strerror}): {without}")


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning(line)
