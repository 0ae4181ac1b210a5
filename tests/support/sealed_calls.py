"""Seals itself as an interpreter does, then tries what agent code tried; prints what got through, as JSON.

Run as a program with one argument, JSON: ``sandbox`` (the folder of sandbox.py), ``landlock`` (at most this version),
``secret`` (a file it must learn nothing of), ``victim`` (a process of the same user), ``queue`` and ``segment`` (ids of
System V), ``folder`` (one that it may write to, or null). An attempt is a function that raises OSError where it is
refused.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

AT_FDCWD = -100
SIGKILL = 9
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FIOASYNC, FIOSETOWN = 0x80086601, 0x40086602, 0x5452, 0x8901
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15
O_PATH = 0o10000000
FUTEX, FSTAT = {"x86_64": 202, "aarch64": 98}, {"x86_64": 5, "aarch64": 80}
FUTEX_WAKE, MADV_PAGEOUT = 1, 21

_libc = ctypes.CDLL(None, use_errno=True)


def c(function: str, *arguments: Any) -> int:
    """A function of the C library; raises OSError where it says -1."""
    result = getattr(_libc, function)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), function)
    return result


def new_call(number: int, *arguments: Any) -> int:
    """A call that the C library does not know yet. It must not even be looked at."""
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result == -1 and ctypes.get_errno() in (1, 38):  # EPERM, ENOSYS; any other error is the kernel's judgement
        raise OSError(ctypes.get_errno(), str(number))
    return result


def attempts(told: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """By name."""
    path = told["secret"].encode()
    victim = told["victim"]
    buffer = ctypes.create_string_buffer(4096)
    library = os.open(os.__file__, os.O_RDONLY)  # what agent code may open anyway
    acl = struct.pack("<IHHIHHIHHI", 2, 1, 0, 2**32 - 1, 4, 0, 2**32 - 1, 32, 0, 2**32 - 1)
    page = ctypes.c_void_p(id(object) & -mmap.PAGESIZE)
    xattr_args = struct.pack("<QII", ctypes.addressof(ctypes.create_string_buffer(acl)), len(acl), 0)

    def signal_by_pipe() -> None:
        fcntl.fcntl(0, F_SETOWN, victim)
        fcntl.fcntl(0, F_SETSIG, SIGKILL)
        fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC)

    def posix_timers() -> None:
        for _ in range(4):
            c("timer_create", 0, None, buffer)

    return {
        "A2 os.stat": lambda: os.stat(told["secret"]),
        "A2 os.lstat": lambda: os.lstat(told["secret"]),
        "A2 stat": lambda: c("stat", path, buffer),
        "A2 statx": lambda: c("statx", AT_FDCWD, path, 0, 0xFFF, buffer),
        "A2 fstatat, empty path allowed": lambda: c("fstatat", AT_FDCWD, path, buffer, 0x1000),
        "A2 access": lambda: c("access", path, 0),
        "A2 readlink": lambda: c("readlink", b"/proc/self/exe", buffer, 4096),
        "A2 chdir": lambda: c("chdir", os.path.dirname(path)),
        "A2 statfs": lambda: c("statfs", path, buffer),
        "A2 open with O_PATH": lambda: os.open(told["secret"], O_PATH),
        "A2 open": lambda: os.open(told["secret"], os.O_RDONLY),
        "A2 list": lambda: os.listdir(os.path.dirname(told["secret"])),
        "A2 getxattr": lambda: c("getxattr", path, b"user.x", buffer, 4096),
        "A2 inotify": lambda: c("inotify_init1", 0),
        "A2 handle": lambda: c("name_to_handle_at", AT_FDCWD, path, buffer, buffer, 0),
        "A3 chmod": lambda: c("chmod", path, 0o644),
        "A3 setxattr": lambda: c("setxattr", path, b"user.x", b"1", 1, 0),
        "A3 setxattrat": lambda: new_call(463, AT_FDCWD, path, 0, b"system.posix_acl_access", xattr_args, 16),
        "A3 getxattrat": lambda: new_call(464, AT_FDCWD, path, 0, b"user.x", xattr_args, 16),
        "A3 removexattrat": lambda: new_call(466, AT_FDCWD, path, 0, b"user.x"),
        "A3 file_getattr": lambda: new_call(468, AT_FDCWD, path, buffer, 24, 0),
        "A3 file_setattr": lambda: new_call(469, AT_FDCWD, path, buffer, 24, 0),
        "A3 FS_IOC_GETFLAGS": lambda: fcntl.ioctl(library, FS_IOC_GETFLAGS, bytes(8)),
        "A4 signal through a pipe": signal_by_pipe,
        "A4 F_SETOWN_EX": lambda: fcntl.fcntl(0, F_SETOWN_EX, struct.pack("ii", 1, victim)),
        "A4 FIOSETOWN": lambda: fcntl.ioctl(0, FIOSETOWN, struct.pack("i", victim)),
        "A4 FIOASYNC": lambda: fcntl.ioctl(0, FIOASYNC, struct.pack("i", 1)),
        "A4 O_ASYNC in open": lambda: os.open(os.__file__, os.O_RDONLY | os.O_ASYNC),
        "A4 kill": lambda: os.kill(victim, 0),
        "A4 pidfd_open": lambda: new_call(434, victim, 0),
        "A5 read a queue": lambda: c("msgrcv", told["queue"], buffer, 64, 0, 0o4000),
        "A5 remove a queue": lambda: c("msgctl", told["queue"], 0, None),
        "A5 attach a segment": lambda: c("shmctl", told["segment"], 2, buffer),
        "A5 make a semaphore": lambda: c("semget", 0, 1, 0o1600),
        "A6 flock": lambda: fcntl.flock(0, fcntl.LOCK_SH),
        "A6 lock of a range": lambda: fcntl.lockf(library, fcntl.LOCK_SH | fcntl.LOCK_NB),
        "A6 lease": lambda: fcntl.fcntl(library, 1024, fcntl.F_RDLCK),
        "A8 POSIX timers": posix_timers,
        "A8 timerfd": lambda: c("timerfd_create", 0, 0),
        "a shared futex": lambda: c("syscall", FUTEX[os.uname().machine], page, FUTEX_WAKE, 1, None, None, 0),
        "a shared mapping of a library": lambda: mmap.mmap(library, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ),
        "an emptied page cache": lambda: c("madvise", page, ctypes.c_size_t(mmap.PAGESIZE), MADV_PAGEOUT),
        "when a library was last read": lambda: c("syscall", FSTAT[os.uname().machine], library, buffer),
        "a file made elsewhere": lambda: os.open(told["secret"] + ".new", os.O_WRONLY | os.O_CREAT),
        "a file cut short": lambda: os.open(told["secret"], os.O_RDONLY | os.O_TRUNC),
        "a file written to": lambda: os.open(told["secret"], os.O_WRONLY | os.O_APPEND),
        "a folder made elsewhere": lambda: os.mkdir(told["secret"] + ".d"),
        "a file removed": lambda: os.unlink(told["secret"]),
        "a file taken": lambda: os.rename(told["secret"], os.path.join(told["folder"] or "/tmp", "taken")),
        "a link": lambda: os.symlink(told["secret"], os.path.join(told["folder"] or "/tmp", "link")),
        "a second name": lambda: os.link(told["secret"], os.path.join(told["folder"] or "/tmp", "name")),
        "a named pipe": lambda: os.mkfifo(os.path.join(told["folder"] or "/tmp", "pipe")),
        "a file without a name": lambda: os.open(told["folder"] or "/tmp", os.O_TMPFILE | os.O_RDWR),
        "a lock in its folder": lambda: fcntl.flock(os.open(told["folder"] or "/tmp", os.O_RDONLY), fcntl.LOCK_EX),
        "a pipe, whose memory is counted for the user": os.pipe,
    }


def main() -> None:
    told = json.loads(sys.argv[1])
    sys.path.insert(0, told["sandbox"])
    import sandbox

    real = sandbox.landlock_abi()
    sandbox.landlock_abi = lambda: min(real, told["landlock"])
    tried = attempts(told)
    try:
        import opened_files

        opened_files.install()
    except ImportError:
        pass  # an older worker, to see what it let through
    folder = {"folder": told["folder"], "file_bytes": 2**20} if told["folder"] else {}
    sandbox.confine({"level": "seccomp", "memory_mb": 256, **folder})
    through = []
    for name, attempt in tried.items():
        try:
            attempt()
        except OSError:
            continue
        through.append(name)
    own = "stat" if sandbox.landlock_abi() == 0 or os.stat(os.__file__).st_size > 0 else "no stat"
    print(json.dumps({"tried": len(tried), "through": through, "own files": own}), flush=True)


if __name__ == "__main__":
    main()
