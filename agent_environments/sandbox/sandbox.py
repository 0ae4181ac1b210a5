"""Takes rights from a process that runs agent code, through the kernel's own calls; nothing here needs a package.

Levels, each with all that the one before it has:

    none         a process of its own
    rlimits      bounded memory, files and file sizes; no capabilities; no new privileges; memory unreadable to others
    seccomp      only the system calls that an interpreter needs (syscalls.py): no new processes or threads, no exec, no
                 sockets, no signals to others, no locks, no writing to any file system, no question about a path;
                 reading only below the Python installation (Landlock; on kernels without it no file can be opened).
                 A folder to write to may be granted
    bubblewrap   the whole world server runs in namespaces of its own, in which nothing but Python and the dataset's
                 agent view exists (started that way by the pool; in here it is "seccomp")
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

import syscalls

LEVELS = ("none", "rlimits", "seccomp", "bubblewrap")

libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
WRITING_ABI = 3
"""The version of Landlock (Linux 6.2) from which on it refuses to truncate a file that may not be written."""
WRITING_MISSING = "a folder to write to needs a kernel from Linux 6.2 on, with Landlock"
_READ = (1 << 2) | (1 << 3)
"""Landlock's rights to read a file, and to list a folder."""
_WRITE = (1 << 1) | (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8) | (1 << 13) | (1 << 14)
"""Landlock's rights to write and truncate a file, to make and remove files and folders, to move them between folders.
No links, devices, sockets or pipes."""


def check(result: int, what: str) -> int:
    """Return the result of a C library call; if the call failed, raise an OSError that names ``what``."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; exit at once if the parent has died already."""
    parent = os.getppid()
    check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def undumpable(closed: bool = True) -> None:
    """Deny other processes of this user /proc/<pid>/mem, ptrace and core dumps; or, not ``closed``, allow them."""
    check(libc.prctl(_PR_SET_DUMPABLE, int(not closed), 0, 0, 0), "PR_SET_DUMPABLE")


def close_descriptors_except(descriptors: set[int]) -> None:
    """Close every inherited file descriptor that is not in ``descriptors``."""
    first = 0
    for descriptor in sorted(descriptors):
        if first < descriptor:  # CPython 3.11 closes everything when asked to close the empty range before 0
            os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 2**31 - 1)


def silence(descriptors: Sequence[int]) -> None:
    """Replace each descriptor with a private /dev/null: processes share the owner, flags and locks of an open file."""
    for descriptor in descriptors:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, descriptor)
        os.close(null)


def confine(settings: dict[str, Any]) -> None:
    """Drop for good the rights that ``settings["level"]`` excludes; raises OSError if the kernel refuses.

    At level "seccomp", ``settings["folder"]``, if given, may be read and written, with files up to ``file_bytes``.
    """
    folder = settings.get("folder")
    level = LEVELS.index(settings["level"])
    if level >= LEVELS.index("rlimits"):
        _limit_resources(settings["memory_mb"], settings["file_bytes"] if folder else 2**20)
        give_up_rights()
        undumpable()
    if level >= LEVELS.index("seccomp"):
        restricted = landlock_abi() > 0
        if folder and landlock_abi() < WRITING_ABI:
            raise OSError(errno.ENOSYS, WRITING_MISSING)
        if restricted:
            _restrict_files(readable_folders(), folder)
        _install_filter(restricted, folder is not None)


def limit_memory(memory_mb: int) -> None:
    """Limit this process's mapped memory to its present size plus ``memory_mb`` MiB."""
    with open("/proc/self/statm") as file:
        inherited = int(file.read().split()[0]) * resource.getpagesize()
    lower({resource.RLIMIT_AS: inherited + memory_mb * 2**20})


def limit_files(size: int) -> None:
    """Limit each file that this process writes to ``size`` bytes; in Python a longer write fails with EFBIG."""
    lower({resource.RLIMIT_FSIZE: size})


def _limit_resources(memory_mb: int, file_bytes: int) -> None:
    limit_memory(memory_mb)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 1,  # not enforced for uid 0; there it is seccomp that forbids new processes
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 0,  # timers and queued signals are counted for the user as a whole
    }
    lower(limits)


def lower(limits: dict[int, int]) -> None:
    """Lower the limits of resources, given by their numbers in :mod:`resource`; keep limits that are lower already."""
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def give_up_rights() -> None:
    """Drop all capabilities and give up gaining rights by executing programs."""
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # EPERM: the process has no capabilities; EINVAL: past the last one
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    check(libc.capset(header, bytes(24)), "capset")
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock, 0 without Landlock."""
    return max(0, libc.syscall(syscalls.LANDLOCK_CREATE_RULESET, None, 0, 1))


def readable_folders() -> list[str]:
    """Return the folders that Python needs to import modules and to look up time zones, and nothing else."""
    import sysconfig  # here and below, so that a box imports little

    folders = {os.path.join(sys.prefix, "lib"), os.path.join(sys.base_prefix, "lib"), sysconfig.get_path("stdlib")}
    folders |= {"/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"}
    return sorted(folder for folder in folders if os.path.isdir(folder))


def _restrict_files(readable: list[str], writable: str | None) -> None:
    abi = landlock_abi()
    # All file-system rights this kernel knows are handled, that is, denied unless granted below; from version 4 on also
    # TCP, from 6 on signals and abstract sockets to processes outside.
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = check(
        libc.syscall(syscalls.LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0), "landlock_create_ruleset"
    )
    for folder in [*readable, *filter(None, [writable])]:
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ | _WRITE if folder == writable else _READ, descriptor)
        check(libc.syscall(syscalls.LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), "landlock_add_rule")
        os.close(descriptor)
    check(libc.syscall(syscalls.LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _install_filter(may_open: bool, has_folder: bool) -> None:
    machine = os.uname().machine
    try:
        install_filter(syscalls.filter_program(syscalls.table(machine, may_open, has_folder)))
    except KeyError as error:
        raise OSError(errno.ENOSYS, f"no seccomp filter is written for {machine}") from error


def install_filter(program: bytes) -> None:
    """Make the kernel filter every system call with a program from :func:`syscalls.filter_program`."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "PR_SET_SECCOMP")


def probe() -> str:
    """Try the levels in a child; return the name of the strongest that works on this machine, never "bubblewrap"."""
    import socket  # noqa: F401 - a sealed process imports nothing any more

    for level in ("seccomp", "rlimits"):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                confine({"level": level, "memory_mb": 256})
                status = 0 if level != "seccomp" or _cannot_escape() else 1
            finally:
                os._exit(status)
        if os.waitpid(pid, 0)[1] == 0:
            return level
    return "none"


def _cannot_escape() -> bool:
    """Return whether the sandbox really holds; tries one way of escape for each protection."""
    import socket

    parent = os.getppid()
    attempts = (
        os.fork,
        socket.socket,
        lambda: os.kill(parent, 0),
        lambda: fcntl.fcntl(0, fcntl.F_SETOWN, parent),
        lambda: fcntl.flock(0, fcntl.LOCK_SH),
        lambda: os.open("/tmp", os.O_WRONLY | os.O_TMPFILE),
        lambda: os.open("/proc/self/environ", os.O_RDONLY),
        lambda: os.stat("/"),
        lambda: os.chdir("/"),
        lambda: os.readlink("/proc/self/exe"),
        lambda: check(libc.msgget(0, 0o1600), "msgget"),
        lambda: check(libc.timer_create(0, None, ctypes.create_string_buffer(8)), "timer_create"),
    )
    for attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        return False
    return True
