"""The seccomp filter, run by an interpreter of its language: both architectures are tested on either."""

from __future__ import annotations

import errno
import struct
import sys
from pathlib import Path

import pytest

from agent_environments.sandbox import SANDBOX_FOLDER

sys.path.insert(0, str(SANDBOX_FOLDER))

import syscalls

from support.texts import texts_beside

TABLES = texts_beside(__file__)

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ARCHITECTURES = sorted(AUDIT_ARCH)


def refused(code: int) -> int:
    return 0x00050000 | code


def run(program: bytes, number: int, arch: int, *arguments: int) -> int:
    """What the kernel would do with a call: the filter's answer."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<iIQ6Q", number, arch, 0, *(argument & (2**64 - 1) for argument in padded))
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, k = instructions[at]
        at += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x06:  # return
            return k
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            at += if_true if holds else if_false


@pytest.fixture(params=ARCHITECTURES)
def ask(request):
    """A function: (number, arguments) -> what the filter of an architecture answers. Knows the architecture's name."""
    program = syscalls.filter_program(syscalls.table(request.param, may_open=True))

    def ask(number: int, *arguments: int) -> int:
        return run(program, number, AUDIT_ARCH[request.param], *arguments)

    ask.architecture = request.param
    ask.number = lambda name: syscalls.number(request.param, name)
    return ask


# x86-64, aarch64
KNOWN = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigreturn": (15, 139), "getdents64": (217, 61),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "getrandom": (318, 278),
}  # fmt: skip
OTHERS = TABLES["others"]
NEW = {
    "io_uring_setup": 425, "clone3": 435, "openat2": 437, "faccessat2": 439, "futex_wait": 455, "setxattrat": 463,
    "getxattrat": 464, "removexattrat": 466, "open_tree_attr": 467, "file_getattr": 468, "file_setattr": 469,
    "one of a kernel to come": 500, "x32's read": 0x40000000,
}  # fmt: skip


def test_what_an_interpreter_needs_is_allowed(ask):
    column = ("x86_64", "aarch64").index(ask.architecture)
    for name, numbers in KNOWN.items():
        assert ask(numbers[column]) == ALLOW, name
        assert ask.number(name) == numbers[column]


def test_all_else_is_refused(ask):
    column = ("x86_64", "aarch64").index(ask.architecture)
    for name, numbers in OTHERS.items():
        assert ask(numbers[column]) == refused(errno.EPERM), name
    for name, number in NEW.items():
        assert ask(number) == refused(errno.ENOSYS), name


def test_nothing_is_allowed_but_the_list(ask):
    listed = syscalls.table(ask.architecture, may_open=True).allowed
    assert len(listed) < 60
    for number in range(1024):
        assert number in listed or ask(number) != ALLOW, number


def test_another_architectures_numbers_kill():
    for architecture in ARCHITECTURES:
        program = syscalls.filter_program(syscalls.table(architecture, may_open=True))
        for other in (*AUDIT_ARCH.values(), 0x40000003):  # the last one is i386
            answer = run(program, 0, other)
            assert (answer == KILL_PROCESS) == (other != AUDIT_ARCH[architecture])


@pytest.mark.parametrize(
    ("command", "allowed"),
    [("F_GETFD", 1), ("F_SETFD", 2), ("F_GETFL", 3)],
)
def test_fcntl_that_is_needed(ask, command, allowed):
    assert ask(ask.number("fcntl"), 3, allowed) == ALLOW, command
    assert ask(ask.number("fcntl"), 3, 2**32 | allowed) == ALLOW  # the kernel drops the upper half too


@pytest.mark.parametrize(
    ("command", "number"),
    [
        *(("F_DUPFD", 0), ("F_SETFL", 4), ("F_GETLK", 5), ("F_SETLK", 6), ("F_SETLKW", 7), ("F_SETOWN", 8)),
        *(("F_SETSIG", 10), ("F_SETOWN_EX", 15), ("F_OFD_SETLK", 37), ("F_SETLEASE", 1024), ("F_NOTIFY", 1026)),
        ("F_ADD_SEALS", 1033),
    ],
)
def test_fcntl_that_reaches_others(ask, command, number):
    assert ask(ask.number("fcntl"), 3, number, 1) == refused(errno.EPERM), command


def test_ioctl(ask):
    assert ask(ask.number("ioctl"), 1, 0x5401) == ALLOW  # TCGETS: isatty
    others = {"FIOASYNC": 0x5452, "FIOSETOWN": 0x8901, "TIOCSTI": 0x5412, "TIOCSCTTY": 0x540E, "FICLONE": 0x40049409}
    flags = {"FS_IOC_SETFLAGS": 0x40086602, "FS_IOC_FSSETXATTR": 0x401C5820, "FS_IOC_GETFLAGS": 0x80086601}
    for name, command in (others | flags).items():
        assert ask(ask.number("ioctl"), 3, command) == refused(errno.EPERM), name


def test_files_are_opened_for_reading_only(ask):
    openat = ask.number("openat")
    directory, nofollow = {"x86_64": (0o200000, 0o400000), "aarch64": (0o40000, 0o100000)}[ask.architecture]
    for flags in (0, 0o2000000, 0o2000000 | directory, nofollow, 0o4000):
        assert ask(openat, -100, 0x1000, flags) == ALLOW, oct(flags)
    writing = {
        "O_WRONLY": 1,
        "O_RDWR": 2,
        "O_CREAT": 0o100,
        "O_TRUNC": 0o1000,
        "O_APPEND": 0o2000,
        "O_TMPFILE": 1 << 22,
    }
    for name, flag in {**writing, "O_PATH": 0o10000000, "O_ASYNC": 0o20000, "O_NOATIME": 0o1000000}.items():
        assert ask(openat, -100, 0x1000, 0o2000000 | flag) == refused(errno.EACCES), name


def test_futexes_are_private(ask):
    futex = ask.number("futex")
    wait, wake, wait_until, shared_until = 128, 129, 128 | 9 | 256, 9 | 256
    for operation in (wait, wake, wait_until):
        assert ask(futex, 0x1000, operation) == ALLOW
    for operation in (0, 1, 3, 4, 5, 9, 10, shared_until):
        assert ask(futex, 0x1000, operation) == refused(errno.EPERM), operation


def test_mappings_are_private(ask):
    call = ask.number("mmap")
    shared, private, validate, fixed, anonymous = 1, 2, 3, 0x10, 0x20
    for flags in (private, private | fixed, private | anonymous, private | 0x800, private | 0x20000 | anonymous):
        assert ask(call, 0, 4096, 1, flags, 3, 0) == ALLOW, hex(flags)
    for flags in (shared, validate, shared | fixed, shared | anonymous):
        assert ask(call, 0, 4096, 1, flags, 3, 0) == refused(errno.EACCES), hex(flags)


def test_the_page_cache_is_left_alone(ask):
    dont_need, cold, page_out = 4, 20, 21
    assert ask(ask.number("madvise"), 0x1000, 4096, dont_need) == ALLOW
    for advice in (cold, page_out):
        assert ask(ask.number("madvise"), 0x1000, 4096, advice) == refused(errno.EPERM)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_program_in_a_box_has_all_but_what_is_listed(architecture):
    program = syscalls.filter_program(syscalls.refused_in_a_box(architecture), listed_only=False)
    column = ("x86_64", "aarch64").index(architecture)
    answers = {
        (OTHERS["socket"][column],): ALLOW,
        (OTHERS["execve"][column],): ALLOW,
        (OTHERS["clone"][column], 0x01200011): ALLOW,  # as the C library forks
        (OTHERS["clone"][column], 0x10000011): refused(errno.EACCES),
        (OTHERS["mount"][column],): refused(errno.ENOSYS),
        (435,): refused(errno.ENOSYS),
        (syscalls.number(architecture, "fcntl"), 3, 4): ALLOW,
        (syscalls.number(architecture, "fcntl"), 3, 10): refused(errno.EPERM),
        (0x40000000 | OTHERS["mount"][column],): refused(errno.ENOSYS),
    }
    for (number, *arguments), answer in answers.items():
        assert run(program, number, AUDIT_ARCH[architecture], *arguments) == answer, (number, arguments)
    assert run(program, 0, 0x40000003) == KILL_PROCESS


def test_without_landlock_nothing_is_opened():
    for architecture in ARCHITECTURES:
        program = syscalls.filter_program(syscalls.table(architecture, may_open=False))
        openat = syscalls.number(architecture, "openat")
        assert run(program, openat, AUDIT_ARCH[architecture], -100, 0x1000, 0) == refused(errno.EPERM)


def test_limits_are_read_not_set(ask):
    prlimit = ask.number("prlimit64")
    assert ask(prlimit, 0, 9, 0, 0x1000) == ALLOW
    for pid, new in ((1, 0), (0, 0x1000), (0, 1 << 32)):
        assert ask(prlimit, pid, 9, new, 0x1000) == refused(errno.EPERM)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_numbers_are_the_kernel_headers(architecture):
    """Where the headers are installed: every row of the table against them."""
    headers = {
        "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
        "aarch64": "/usr/include/asm-generic/unistd.h",
    }
    header = Path(headers[architecture])
    if not header.exists():
        pytest.skip(f"no kernel headers at {header}")
    numbers = {}
    for line in header.read_text().splitlines():
        words = line.split()
        if len(words) >= 3 and words[0] == "#define" and words[1].startswith("__NR") and words[2].isdigit():
            numbers[words[1].removeprefix("__NR3264_").removeprefix("__NR_")] = int(words[2])
    column = ("x86_64", "aarch64").index(architecture)
    for name, row in {**syscalls._CALLS, **syscalls._REFUSED_IN_A_BOX}.items():
        assert row[column] is None or numbers.get(name, row[column]) == row[column], name
