"""Processes as /proc shows them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from loop_plumbing.process_guard import descendants

_CHECKOUT = Path(__file__).parents[2]
IMPORT_PATH = os.pathsep.join(str(folder) for folder in (_CHECKOUT / "recipes", _CHECKOUT, _CHECKOUT / "tests"))
"""PYTHONPATH of a process that imports ``support``. The packages are named too, because ``tests/`` has folders of the
same names, which would be imported as empty packages in place of the installed ones."""


def write_program(file: Path, script: str) -> Path:
    """A shell script that can be run."""
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def alive(pid: int) -> bool:
    """Return whether it is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def exists(pid: int | str) -> bool:
    """Return whether it is there, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def parent_of(pid: int) -> int:
    """The pid of its parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes(needle: str) -> dict[int, str]:
    """Pid -> command line of the live processes whose command line holds ``needle``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if needle in command and alive(int(entry.name)):
                found[int(entry.name)] = command
    return found


def episode_processes(server: int) -> list[int]:
    """Of a fork server: world processes and interpreters: what has a process group of its own below the server."""
    below = descendants(server)
    groups = {}
    for pid in [server, *below]:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            groups[pid] = os.getpgid(pid)
    return [pid for pid in groups if pid != server and groups[pid] in below and groups[pid] != groups.get(server)]


def busy(pids: list[int]) -> bool:
    """Return whether one of them is on a processor or waits for one."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
