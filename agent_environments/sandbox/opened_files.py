"""``os.stat``, ``os.fstat`` and ``os.listdir`` for a process that may open files but may not ask about paths.

The sandbox refuses every call that asks about a path, since nothing in the kernel confines those (syscalls.py). Python
asks before it imports a module or prints a source line. Here it opens the file and asks the descriptor: the answer is
the same for whatever may be opened, and nothing else is there. The C library's own ``fstat`` is of no use, as versions
2.33 to 2.38 make it a question about the empty path; so a shared library that was not loaded before cannot be loaded
there, and :func:`install` loads those of the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import posix
import struct
import sysconfig
from collections.abc import Callable
from typing import Any

import syscalls

_libc = ctypes.CDLL(None, use_errno=True)
_open, _close, _fsdecode, _fspath = os.open, os.close, os.fsdecode, os.fspath
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

# struct stat, up to the seconds and nanoseconds of the last access, change and status change: where in it the fields of
# os.stat_result's first ten are, then the size of a block and their number.
_STAT = {
    "x86_64": ("=QQQIIIxxxxQqqqQQQQQQ", (3, 1, 0, 2, 4, 5, 7), 8, 9, 6),
    "aarch64": ("=QQIIIIQxxxxxxxxqixxxxqQQQQQQ", (2, 1, 0, 3, 4, 5, 7), 8, 9, 6),
}
_NOT_LOADED = ("_test", "_xx", "xx", "_ctypes_test", "_tkinter", "_curses", "readline", "ossaudiodev", "nis")
_DIRECTORY_ENTRY = struct.Struct("=QqHB")


def install() -> None:
    """Put these in the place of the functions of :mod:`os`, and load the libraries that could not be loaded later."""
    _load_standard_library()
    for module in (os, posix):
        module.stat = module.lstat = stat
        module.fstat = fstat
        module.listdir = listdir


def _load_standard_library() -> None:
    folder = sysconfig.get_config_var("DESTSHARED")
    for file in sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else ():
        name = file.partition(".")[0]
        if not name.startswith(_NOT_LOADED):
            with contextlib.suppress(ImportError):  # built without what it needs
                importlib.import_module(name)


def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
    """Of what ``path`` opens; links are followed in any case. Raises OSError if it may not be opened."""
    return fstat(path) if isinstance(path, int) else _opened(path, 0, dir_fd, fstat)


def listdir(path: Any = ".") -> list[Any]:
    """Names in a folder that may be opened; bytes for a path in bytes."""
    names = _names(path) if isinstance(path, int) else _opened(path, os.O_DIRECTORY, None, _names)
    in_bytes = not isinstance(path, int) and isinstance(_fspath(path or "."), bytes)
    return names if in_bytes else [_fsdecode(name) for name in names]


def fstat(descriptor: int) -> os.stat_result:
    """``os.fstat`` by the call of that name."""
    layout, first, block_size, blocks, device_type = _STAT[platform.machine()]
    buffer = ctypes.create_string_buffer(144)
    _call("fstat", descriptor, buffer)
    fields = struct.unpack_from(layout, buffer)
    seconds, nanoseconds = fields[-6::2], fields[-5::2]
    times = [second + nanosecond * 1e-9 for second, nanosecond in zip(seconds, nanoseconds, strict=True)]
    exact = [second * 10**9 + nanosecond for second, nanosecond in zip(seconds, nanoseconds, strict=True)]
    # As CPython fills it: ten items, the same times as floats and as ns, then what the platform has besides.
    ten = [*(fields[index] for index in first), *seconds]
    return os.stat_result([*ten, *times, *exact, fields[block_size], fields[blocks], fields[device_type]])


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
    result = _libc.syscall(syscalls.number(platform.machine(), name), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result
