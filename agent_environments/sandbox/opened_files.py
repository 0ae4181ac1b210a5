"""``os.stat``, ``fstat`` and ``listdir`` for a process that may open files but may ask nothing about them.

The sandbox refuses every call that asks about a path, since nothing in the kernel confines those, and ``fstat``, which
tells when a file was last read: a message from its reader (syscalls.py). Python asks before it imports a module or
prints a source line. Here it opens the file and finds its kind and size; owner and number are 0, and times the same for
all, so a module's compiled file is taken without comparing its source's time. The C library asks before it loads a
shared library, so a library that was not loaded before cannot be loaded there; :func:`install` loads those of the
standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib._bootstrap_external as importing
import os
import posix
import stat as modes
import struct
import sysconfig
from collections.abc import Callable
from typing import Any, NoReturn

import syscalls

_libc = ctypes.CDLL(None, use_errno=True)
_open, _close, _fsdecode, _fspath, _lseek = os.open, os.close, os.fsdecode, os.fspath, os.lseek
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

_NOT_LOADED = ("_test", "_xx", "xx", "_ctypes_test", "_tkinter", "_curses", "readline", "ossaudiodev", "nis")
_DIRECTORY_ENTRY = struct.Struct("=QqHB")
_BLOCK = 512
_TIME = 315_619_200
"""2 January 1980: a ZIP file cannot say an earlier year, in any time zone."""


def install() -> None:
    """Replace :mod:`os`'s functions with this module's, and load the libraries that could not be loaded later."""
    load_standard_library()
    for module in (os, posix):
        module.stat = module.lstat = stat
        module.fstat = fstat
        module.listdir = listdir
        module.scandir = scandir
    importing._validate_timestamp_pyc = lambda *_: None


def load_standard_library() -> None:
    """Load the compiled parts of the standard library."""
    folder = sysconfig.get_config_var("DESTSHARED")
    for file in sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else ():
        name = file.partition(".")[0]
        if not name.startswith(_NOT_LOADED):
            with contextlib.suppress(ImportError):  # built without a library that it needs
                importlib.import_module(name)


def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
    """Return the status of the file ``path``; always follows links; raises OSError if it may not be opened."""
    return fstat(path) if isinstance(path, int) else _opened(path, 0, dir_fd, fstat)


def listdir(path: Any = ".") -> list[Any]:
    """Return the names in a folder that this process may open; bytes if ``path`` is bytes."""
    names = _names(path) if isinstance(path, int) else _opened(path, os.O_DIRECTORY, None, _names)
    in_bytes = not isinstance(path, int) and isinstance(_fspath(path or "."), bytes)
    return names if in_bytes else [_fsdecode(name) for name in names]


def scandir(*_: Any) -> NoReturn:
    """Raise NotImplementedError: os.walk, for one, would take an OSError for an empty folder."""
    raise NotImplementedError("a sealed interpreter has os.listdir, and no os.scandir, os.walk, glob or copy of a tree")


def fstat(descriptor: int) -> os.stat_result:
    """Return the kind and size of an open file; all other fields are the same for every file."""
    mode, size = modes.S_IFDIR | 0o555, 0
    if not _is_folder(descriptor):
        mode = modes.S_IFREG | 0o444
        try:
            position = _lseek(descriptor, 0, os.SEEK_CUR)
            size = _lseek(descriptor, 0, os.SEEK_END)
            _lseek(descriptor, position, os.SEEK_SET)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            mode = modes.S_IFIFO | 0o444
    # As CPython fills it: ten items, the same times as floats and as ns, then what the platform has besides.
    ten = (mode, 0, 0, 1, 0, 0, size, _TIME, _TIME, _TIME)
    times = (*[float(_TIME)] * 3, *[_TIME * 10**9] * 3)
    return os.stat_result([*ten, *times, _BLOCK, -(-size // _BLOCK), 0])


def _is_folder(descriptor: int) -> bool:
    try:
        _call("getdents64", descriptor, None, 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTDIR):  # no room for an entry; no folder
            raise
        return error.errno == errno.EINVAL
    return True


def _opened(path: Any, flags: int, dir_fd: int | None, ask: Callable[[int], Any]) -> Any:
    descriptor = _open(path, _READING | flags, dir_fd=dir_fd)
    try:
        return ask(descriptor)
    finally:
        _close(descriptor)


def _names(descriptor: int) -> list[bytes]:
    names = []
    buffer = ctypes.create_string_buffer(1 << 15)
    while size := _call("getdents64", descriptor, buffer, len(buffer)):
        at = 0
        while at < size:
            _, _, length, _ = _DIRECTORY_ENTRY.unpack_from(buffer, at)
            name = buffer.raw[at + _DIRECTORY_ENTRY.size : at + length].partition(b"\0")[0]
            if name not in (b".", b".."):
                names.append(name)
            at += length
    return names


def _call(name: str, *arguments: Any) -> int:
    result = _libc.syscall(syscalls.number(os.uname().machine, name), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result
