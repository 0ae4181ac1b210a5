"""The system calls that agent code may make, and the seccomp filter that refuses all others.

The list has the calls of AppWorld's shell, its API client and the standard library, by strace of the reference
solutions and of the attacks. No call on it names a process, an IPC object or, but for ``openat``, a path: Landlock
limits only which paths may be opened, so a process that may ask about a path could read the size of a file that is
closed to it. Nor does a call reveal another process: a futex is private, no file is mapped for sharing, no page cache
is emptied, and no call tells when a file was last read. A later kernel's calls are not on the list, and so refused.

Numbers are those of the kernel's own tables: arch/x86/entry/syscalls/syscall_64.tbl, and
include/uapi/asm-generic/unistd.h for aarch64.
"""

from __future__ import annotations

import errno
import struct
from typing import NamedTuple

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

FIRST_SHARED_NUMBER = 424
"""From here on (Linux 5.1) numbers are the same everywhere, and callers must expect that the kernel lacks them."""

_ARCHITECTURES = ("x86_64", "aarch64")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_CALLS = {
    # name: x86-64, aarch64 (None: not a call there, the C library uses another one)
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "lseek": (8, 62),
    "close": (3, 57), "openat": (257, 56), "getdents64": (217, 61), "getcwd": (79, 17),
    "fcntl": (72, 25), "ioctl": (16, 29),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "futex": (202, 98), "sched_yield": (24, 124),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigpending": (127, 136), "rt_sigreturn": (15, 139),
    "restart_syscall": (219, 128),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "prlimit64": (302, 261), "uname": (63, 160), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip

_CALLS_OF_A_FOLDER = {
    "ftruncate": (77, 46), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
}  # fmt: skip
"""Further calls of a process that has a folder to write to. Landlock refuses each of them outside of that folder."""

_X32 = 0x40000000
_REFUSED_IN_A_BOX = {
    "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435), "mount": (165, 40), "umount2": (166, 39),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "timer_create": (222, 107), "mq_notify": (244, 184),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "inotify_init": (253, 26),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
}  # fmt: skip
"""Calls that a program in a box does without: of namespaces (for clone3 the C library falls back on clone, whose flags
the filter sees), much of the kernel's surface, calls that act for or wake a stopped process, that reveal who opens a
file that all boxes share, and that allocate memory outside any process."""


class OneOf(NamedTuple):
    """Condition: argument ``index``, an int unless ``wide``, is one of ``values``, which are below 2**32."""

    index: int
    values: tuple[int, ...]
    wide: bool = False


class Within(NamedTuple):
    """Condition: argument ``index``, an int, has no bit outside ``bits``; else the call fails with EACCES."""

    index: int
    bits: int


Condition = OneOf | Within

_F_GETFD, _F_SETFD, _F_GETFL = 1, 2, 3
_TCGETS, _FIONCLEX, _FIOCLEX, _TIOCGWINSZ = 0x5401, 0x5450, 0x5451, 0x5413
# The flags of an open for reading: O_NOCTTY, O_NONBLOCK, O_CLOEXEC, then O_DIRECTORY, O_NOFOLLOW and O_LARGEFILE, which
# differ. Not among them: O_PATH, which Landlock lets pass for any file, and O_ASYNC.
_READING = {
    "x86_64": 0o400 | 0o4000 | 0o2000000 | 0o200000 | 0o400000 | 0o100000,
    "aarch64": 0o400 | 0o4000 | 0o2000000 | 0o40000 | 0o100000 | 0o400000,
}
# O_WRONLY, O_RDWR, O_CREAT, O_EXCL, O_TRUNC and O_APPEND. Not among them: O_TMPFILE.
_WRITING = 0o1 | 0o2 | 0o100 | 0o200 | 0o1000 | 0o2000
_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_REQUEUE, _FUTEX_CMP_REQUEUE, _FUTEX_WAKE_OP = 0, 1, 3, 4, 5
_FUTEX_WAIT_BITSET, _FUTEX_WAKE_BITSET = 9, 10
_FUTEX_PRIVATE, _FUTEX_CLOCK_REALTIME = 128, 256
# A futex that is not private, on a page of a library, is the same one in every process that has mapped it.
_PRIVATE_FUTEXES = (
    *(_FUTEX_PRIVATE | each for each in (_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_REQUEUE, _FUTEX_CMP_REQUEUE, _FUTEX_WAKE_OP)),
    *(_FUTEX_PRIVATE | each for each in (_FUTEX_WAIT_BITSET, _FUTEX_WAKE_BITSET)),
    _FUTEX_PRIVATE | _FUTEX_WAIT_BITSET | _FUTEX_CLOCK_REALTIME,
)
# MAP_PRIVATE with MAP_FIXED, MAP_ANONYMOUS, MAP_32BIT, MAP_GROWSDOWN, MAP_DENYWRITE, MAP_NORESERVE, MAP_POPULATE,
# MAP_STACK and MAP_FIXED_NOREPLACE. Not among them: the bit of MAP_SHARED and MAP_SHARED_VALIDATE.
_PRIVATE_MAPPING = 0x2 | 0x10 | 0x20 | 0x40 | 0x100 | 0x800 | 0x4000 | 0x8000 | 0x20000 | 0x100000
# MADV_NORMAL, MADV_DONTNEED, MADV_FREE, MADV_HUGEPAGE and MADV_NOHUGEPAGE, of an allocator. Not MADV_PAGEOUT, which
# empties the page cache of a library: the next reader sees by the clock that it was emptied.
_ADVICE = (0, 4, 8, 14, 15)
# The flags of clone for namespaces: time, mount, cgroup, uts, ipc, user, pid, network.
_CLONE_NEW = 0x80 | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# All but F_SETSIG, by which a SIGCONT comes to a process that is stopped.
_FCNTL_WITHOUT_SIGNALS = (*range(10), 11, 15, 16, *range(36, 39), *range(1024, 1035))


class SyscallTable(NamedTuple):
    """The content of one architecture's filter: call number -> the conditions under which the call is allowed."""

    audit_arch: int
    allowed: dict[int, tuple[Condition, ...] | None]
    """None: never."""


def table(architecture: str, may_open: bool, has_folder: bool = False) -> SyscallTable:
    """Return the filter's table; raises KeyError for an architecture that is not listed.

    Args:
        may_open: whether files may be opened, because Landlock protects them.
        has_folder: whether a folder may be written to, which Landlock of version 3 or later confines.
    """
    writing = _WRITING if has_folder else 0
    conditions: dict[str, tuple[Condition, ...]] = {
        # Not F_SETOWN, F_SETSIG and F_SETFL (signals to any process of the user), nor locks and leases.
        "fcntl": (OneOf(1, (_F_GETFD, _F_SETFD, _F_GETFL)),),
        "ioctl": (OneOf(1, (_TCGETS, _FIONCLEX, _FIOCLEX, _TIOCGWINSZ)),),
        "prlimit64": (OneOf(0, (0,)), OneOf(2, (0,), wide=True)),  # to read one's own limits
        "openat": (Within(2, _READING[architecture] | writing),),
        "futex": (OneOf(1, _PRIVATE_FUTEXES),),
        "mmap": (Within(3, _PRIVATE_MAPPING),),
        "madvise": (OneOf(2, _ADVICE),),
    }
    column = _ARCHITECTURES.index(architecture)
    calls = _CALLS | (_CALLS_OF_A_FOLDER if has_folder else {})
    allowed = {
        numbers[column]: conditions.get(name, ()) for name, numbers in calls.items() if may_open or name != "openat"
    }
    return SyscallTable(
        _AUDIT_ARCH[architecture], {number: each for number, each in allowed.items() if number is not None}
    )


def refused_in_a_box(architecture: str) -> SyscallTable:
    """Return the calls, or arguments of calls, that a program in a box may not use; raises KeyError for an architecture
    that is not listed."""
    audit_arch, column = _AUDIT_ARCH[architecture], _ARCHITECTURES.index(architecture)
    refused: dict[int, tuple[Condition, ...] | None] = {each[column]: None for each in _REFUSED_IN_A_BOX.values()}
    refused[(56, 220)[column]] = (Within(0, 0xFFFFFFFF & ~_CLONE_NEW),)
    refused[(72, 25)[column]] = (OneOf(1, _FCNTL_WITHOUT_SIGNALS),)
    return SyscallTable(audit_arch, refused)


def number(architecture: str, name: str) -> int:
    """Return the number of a call; raises KeyError for a call that is not on the list."""
    value = _CALLS[name][_ARCHITECTURES.index(architecture)]
    if value is None:
        raise KeyError(name)
    return value


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000

_Instruction = tuple[int, int, int, int]


def filter_program(allowed: SyscallTable, listed_only: bool = True) -> bytes:
    """Return BPF over ``struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}``, little-endian.

    With ``listed_only`` unlisted calls fail, with ENOSYS from FIRST_SHARED_NUMBER on and EPERM below; else they pass.
    A listed call fails if an argument breaks a condition.
    """
    program: list[_Instruction] = [
        _step(_LOAD, 4),
        _step(_EQUAL, allowed.audit_arch, 1, 0),
        _step(_GIVE, _KILL_PROCESS),  # another architecture's numbers would mean other calls
        _step(_LOAD, 0),
    ]
    for call, conditions in allowed.allowed.items():
        block = [step for condition in conditions or () for step in _check(condition)]
        block.append(_step(_GIVE, _ALLOW if conditions is not None else _FAIL | errno.ENOSYS))
        program += [_step(_EQUAL, call, 0, len(block)), *block]
    if not listed_only:  # but for the numbers of x32, by which the same calls can be made
        program += [_step(_AT_LEAST, _X32, 1, 0), _step(_GIVE, _ALLOW)]
    program += [
        _step(_AT_LEAST, FIRST_SHARED_NUMBER, 0, 1),
        _step(_GIVE, _FAIL | errno.ENOSYS),
        _step(_GIVE, _FAIL | errno.EPERM),
    ]
    return b"".join(struct.pack("<HBBI", code, if_true, if_false, k) for code, k, if_true, if_false in program)


def _step(code: int, k: int, if_true: int = 0, if_false: int = 0) -> _Instruction:
    return code, k, if_true, if_false


def _check(condition: Condition) -> list[_Instruction]:
    """Return instructions that fail the call if ``condition`` is broken, and else continue behind the last one."""
    low = 16 + 8 * condition.index
    if isinstance(condition, Within):
        refused = 0xFFFFFFFF & ~condition.bits
        return [_step(_LOAD, low), _step(_ANY_BIT, refused, 0, 1), _step(_GIVE, _FAIL | errno.EACCES)]
    steps = []
    if condition.wide:
        steps += [_step(_LOAD, low + 4), _step(_EQUAL, 0, 1, 0), _step(_GIVE, _FAIL | errno.EPERM)]
    steps.append(_step(_LOAD, low))
    for left, value in zip(range(len(condition.values), 0, -1), condition.values, strict=True):
        steps.append(_step(_EQUAL, value, left, 0))
    steps.append(_step(_GIVE, _FAIL | errno.EPERM))
    return steps
