"""Folders that an agent has written: walked, bounded, read and removed, whatever lies there. Linux, standard library.

It may hold folders within each other to any depth, folders and files without any right, names that are no text, links
that lead out, files that are larger than the disk, pipes and sockets. Nothing here follows a link, opens what is no
file, or recurses; and no path is longer than a name, because each folder is reached from the one that it lies in.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_BLOCK = 4096


class _Outer(NamedTuple):
    """A folder while another one that lies in it is looked at: what is left of it, and of that one what is known."""

    names: Iterator[str]
    mode: int | None
    identity: tuple[int, int]
    name: str
    about: os.stat_result


class Written(NamedTuple):
    """Something below a folder: its ``name`` in the open ``folder`` that it lies in, and what lstat says of it.

    It holds until the next one is asked for.
    """

    name: str
    about: os.stat_result
    folder: int
    outer: Sequence[_Outer]

    @property
    def path(self) -> str:
        """From the folder that all of it lies in."""
        return "/".join([*(each.name for each in self.outer), self.name])


def walk(root: str | Path, most: int | None = None, folders_last: bool = False) -> Iterator[Written]:
    """Yield all below ``root``; what is gone meanwhile, or another's, is left out.

    A folder or a file without rights has them while it is looked at.

    Args:
        most: names that are taken from one folder, None for all.
        folders_last: a folder comes after what lies in it, and not before.
    """
    try:
        folder, mode = _opened(os.fspath(root))
    except OSError:
        return
    outer: list[_Outer] = []
    names = _names(folder, most)
    try:
        while True:
            if (name := next(names, None)) is None:
                if not outer:
                    break
                above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
                _give_back(folder, mode)
                folder = above
                names, mode, identity, name, about = outer.pop()
                if _identity(folder) != identity:  # it was moved meanwhile, and this is who knows what
                    mode = None
                    break
                if folders_last:
                    yield Written(name, about, folder, outer)
                continue
            try:
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                is_folder = stat.S_ISDIR(about.st_mode)
                if not (is_folder and folders_last):
                    yield Written(name, about, folder, outer)
                if is_folder:
                    below, of_below = _opened(name, folder)
                    outer.append(_Outer(names, mode, _identity(folder), name, about))
                    os.close(folder)
                    folder, mode, names = below, of_below, _names(below, most)
            except OSError:
                continue
    finally:
        _give_back(folder, mode)


def holds_more(root: str | Path, most_bytes: int, most_files: int) -> bool:
    """Return whether what lies below ``root`` is more bytes, or with its folders more in number, than that.

    A file counts by its length or by the blocks that it takes, whichever is more.
    """
    size = 0
    for number, written in enumerate(walk(root, most_files + 1), 1):
        about = written.about
        size += 0 if stat.S_ISDIR(about.st_mode) else max(about.st_size, about.st_blocks * 512 - _BLOCK)
        if size > most_bytes or number > most_files:
            return True
    return False


def read_files(root: str | Path, most_bytes: int, most_files: int) -> dict[str, bytes] | None:
    """Return the files below ``root`` by their paths from there; None where they are more than that.

    A byte of a name that is no UTF-8 stands there as ``\\xff``. Links, pipes, sockets and what cannot be read have no
    content, and are left out.
    """
    if holds_more(root, most_bytes, most_files):
        return None
    files = {}
    for written in walk(root):
        if stat.S_ISREG(written.about.st_mode):
            with contextlib.suppress(OSError):
                name = os.fsencode(written.path).decode("utf-8", "backslashreplace")
                files[name] = _content(written, most_bytes)
    return dict(sorted(files.items()))


def open_folder(path: str | Path) -> bool:
    """Have a folder be one that may be entered and read; whether ``path`` is a folder, and no link to one."""
    try:
        os.close(_opened(os.fspath(path))[0])
    except OSError:
        return False
    return True


def remove(root: str | Path) -> None:
    """Remove a folder with all that is in it, or what stands in its place; what cannot be removed stays, and raises
    nothing."""
    for written in walk(root, folders_last=True):
        with contextlib.suppress(OSError):
            (os.rmdir if stat.S_ISDIR(written.about.st_mode) else os.unlink)(written.name, dir_fd=written.folder)
    with contextlib.suppress(OSError):
        (os.rmdir if stat.S_ISDIR(os.lstat(root).st_mode) else os.unlink)(root)


def _opened(name: str, folder: int | None = None, kind: int = os.O_DIRECTORY) -> tuple[int, int | None]:
    """Open a folder, or a file, with the rights that this needs; the mode that it had, where that was another."""
    wanted = stat.S_IRWXU if kind == os.O_DIRECTORY else stat.S_IRUSR
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | kind, dir_fd=folder)
    try:
        own = f"/proc/self/fd/{handle}"
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        lacks = mode & wanted != wanted
        if lacks:
            with contextlib.suppress(PermissionError):  # another's: it is tried as it is
                os.chmod(own, mode | wanted)
        return os.open(own, os.O_RDONLY | os.O_NONBLOCK | kind), mode if lacks else None
    finally:
        os.close(handle)


def _give_back(descriptor: int, mode: int | None) -> None:
    """Close what :func:`_opened` has opened, with the mode that it had."""
    with contextlib.suppress(OSError):
        if mode is not None:
            os.fchmod(descriptor, mode)
    os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


def _names(folder: int, most: int | None) -> Iterator[str]:
    with os.scandir(folder) as entries:
        return iter([entry.name for entry in itertools.islice(entries, most)])


def _content(written: Written, most: int) -> bytes:
    descriptor, mode = _opened(written.name, written.folder, kind=0)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        _give_back(descriptor, mode)
