"""Walks and removes folders that an agent has written, whatever lies there. Linux, standard library.

They may hold folders within each other to any depth, folders and files without any right, names that are not text,
links that lead out, files that are larger than the disk, pipes and sockets. Nothing here follows a link, opens anything
but files and folders, or recurses; and no path is longer than a name, because each folder is reached from its parent.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a box has no time for it
    from pathlib import Path


class _Outer(NamedTuple):
    """A folder whose subfolder the walk is in: the names left to visit in the folder, and facts about the subfolder."""

    names: Iterator[str]
    mode: int | None
    identity: tuple[int, int]
    name: str
    about: os.stat_result


class Written(NamedTuple):
    """An entry below a folder: its ``name`` in the open ``folder`` that it lies in, and ``about`` from lstat.

    An entry is valid until the next entry is asked for.
    """

    name: str
    about: os.stat_result
    folder: int
    above: Sequence[_Outer]

    @property
    def path(self) -> str:
        """The path from the root of the walk."""
        return "/".join([*(outer.name for outer in self.above), self.name])


def walk(root: str | Path) -> Iterator[Written]:
    """Yield all entries below ``root``, each folder after its content; skip entries that are gone or another user's.

    A folder without access rights gets them while the walk is in it.
    """
    try:
        folder, mode = _opened(os.fspath(root))
    except OSError:
        return
    outer: list[_Outer] = []
    names = _names(folder)
    try:
        while True:
            if (name := next(names, None)) is None:
                if not outer:
                    break
                above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
                _give_back(folder, mode)
                folder = above
                names, mode, identity, name, about = outer.pop()
                if _identity(folder) != identity:  # it was moved meanwhile: this may be any folder
                    mode = None
                    break
                yield Written(name, about, folder, outer)
                continue
            try:
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISDIR(about.st_mode):
                    yield Written(name, about, folder, outer)
                else:
                    below, of_below = _opened(name, folder)
                    outer.append(_Outer(names, mode, _identity(folder), name, about))
                    os.close(folder)
                    folder, mode, names = below, of_below, _names(below)
            except OSError:
                continue
    finally:
        _give_back(folder, mode)


def open_folder(path: str | Path) -> bool:
    """Give us the rights to enter and read a folder; return whether ``path`` is a folder and not a link to a folder."""
    try:
        os.close(_opened(os.fspath(path))[0])
    except OSError:
        return False
    return True


def remove(root: str | Path) -> None:
    """Remove a folder with all its content, or a file at this path; entries that cannot be removed stay, without an
    error."""
    for written in walk(root):
        with contextlib.suppress(OSError):
            (os.rmdir if stat.S_ISDIR(written.about.st_mode) else os.unlink)(written.name, dir_fd=written.folder)
    with contextlib.suppress(OSError):
        (os.rmdir if stat.S_ISDIR(os.lstat(root).st_mode) else os.unlink)(root)


def _opened(name: str, folder: int | None = None) -> tuple[int, int | None]:
    """Open a folder, adding the rights to read it; return its descriptor, and its old mode if the mode changed."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=folder)
    try:
        own = f"/proc/self/fd/{handle}"
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        lacks = mode & stat.S_IRWXU != stat.S_IRWXU
        if lacks:
            with contextlib.suppress(PermissionError):  # another user's: it is tried as it is
                os.chmod(own, mode | stat.S_IRWXU)
        return os.open(own, os.O_RDONLY | os.O_DIRECTORY), mode if lacks else None
    finally:
        os.close(handle)


def _give_back(descriptor: int, mode: int | None) -> None:
    """Close a folder that :func:`_opened` has opened, and give it its mode back."""
    with contextlib.suppress(OSError):
        if mode is not None:
            os.fchmod(descriptor, mode)
    os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


def _names(folder: int) -> Iterator[str]:
    with os.scandir(folder) as entries:
        return iter([entry.name for entry in entries])
