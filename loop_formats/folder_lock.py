"""Allows one writer at a time in a folder: by a lock that the kernel releases when its holder dies, for any reason."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import TextIO

from loop_formats.schema import ConfigError


def lock_folder(folder: Path, name: str, what: str, key: str) -> TextIO:
    """Hold the lock ``<folder>/<name>`` until the returned file is closed or the process ends.

    Args:
        what: the user of the folder; the error names this user and ``key``, the setting of the folder's path.

    Raises:
        ConfigError: another process holds the lock (the line names it), or the file system has no locks.
    """
    file = open(folder / name, "a+", encoding="utf-8")  # noqa: SIM115 - held as long as its owner lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with file:
            file.seek(0)
            holder = file.read().strip()
        if isinstance(error, BlockingIOError):
            who = f" ({holder})" if holder else ""
            cure = f"wait for its end, stop it, or choose another {key}"
            raise ConfigError(f"another {what} is using {folder}{who}; {cure}") from None
        cure = f"mount its file system with flock, or choose another {key}"
        raise ConfigError(f"{folder} cannot be locked: {error.strerror or error}; {cure}") from error
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = f"{Path(sys.argv[0]).name}, process {os.getpid()} on {socket.gethostname()}, since {began}\n"
    with contextlib.suppress(OSError):  # the disk is full: the lock is held all the same
        file.truncate(0)
        os.write(file.fileno(), holder.encode(errors="replace"))
    return file


def is_locked(folder: Path, name: str) -> bool:
    """Return whether a process holds the lock ``<folder>/<name>``. A symbolic link does not count."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # a file system without locks has no holder
    finally:
        os.close(descriptor)
    return False


def lock_run(output_dir: Path) -> TextIO:
    """Lock the folder of a run with :func:`lock_folder`: two writers would spoil each other's files."""
    return lock_folder(output_dir, "run.lock", "run", "output_dir")
