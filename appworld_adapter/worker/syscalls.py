"""Numbers of the system calls that agent code must not make, for the architectures the sandbox supports."""

from __future__ import annotations

from dataclasses import dataclass

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446


@dataclass(frozen=True)
class Table:
    """``denied`` fail with EPERM, ``unknown`` with ENOSYS; ``opening`` maps open calls to the index of their flags."""

    audit_arch: int
    denied: frozenset[int]
    unknown: frozenset[int]
    opening: dict[int, int]


# Calls since Linux 5.0 have one number everywhere.
_NEW = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "fchmodat2": 452,
}
_UNKNOWN = frozenset({435, 437})  # clone3 and openat2 take their flags in memory, which a filter cannot read

_X86_64 = {
    "shmget": 29, "shmat": 30, "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "socketpair": 53,
    "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "semget": 64, "msgget": 68, "truncate": 76,
    "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "chmod": 90,
    "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "setuid": 105, "setgid": 106, "setpgid": 109,
    "setsid": 112, "setreuid": 113, "setregid": 114, "setgroups": 116, "setresuid": 117, "setresgid": 119,
    "setfsuid": 122, "setfsgid": 123, "rt_sigqueueinfo": 129, "utime": 132, "mknod": 133, "personality": 135,
    "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "pivot_root": 155, "prctl": 157,
    "adjtimex": 159, "setrlimit": 160, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166,
    "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "init_module": 175, "delete_module": 176, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197,
    "lremovexattr": 198, "fremovexattr": 199, "tkill": 200, "sched_setaffinity": 203, "io_setup": 206, "tgkill": 234,
    "utimes": 235, "mq_open": 240, "mq_unlink": 241, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "ioprio_set": 251, "migrate_pages": 256, "mkdirat": 258, "mknodat": 259, "fchownat": 260,
    "futimesat": 261, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "fchmodat": 268,
    "unshare": 272, "splice": 275, "tee": 276, "utimensat": 280, "fallocate": 285, "accept4": 288,
    "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "fanotify_init": 300, "prlimit64": 302, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "finit_module": 313, "sched_setattr": 314, "renameat2": 316, "seccomp": 317, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "execveat": 322, "userfaultfd": 323,
}  # fmt: skip

_AARCH64 = {
    "io_setup": 0, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
    "fremovexattr": 16, "ioprio_set": 30, "mknodat": 33, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37,
    "renameat": 38, "umount2": 39, "mount": 40, "pivot_root": 41, "truncate": 45, "fallocate": 47, "chroot": 51,
    "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "splice": 76, "tee": 77, "utimensat": 88, "acct": 89,
    "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "ptrace": 117,
    "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129, "tkill": 130,
    "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140, "reboot": 142, "setregid": 143, "setgid": 144,
    "setreuid": 145, "setuid": 146, "setresuid": 147, "setresgid": 149, "setfsuid": 151, "setfsgid": 152,
    "setpgid": 154, "setsid": 157, "setgroups": 159, "sethostname": 161, "setdomainname": 162, "setrlimit": 164,
    "prctl": 167, "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "mq_unlink": 181, "msgget": 186, "semget": 190,
    "shmget": 194, "shmat": 196, "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202,
    "connect": 203, "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "execve": 221, "swapon": 224,
    "swapoff": 225, "migrate_pages": 238, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "accept4": 242,
    "prlimit64": 261, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266,
    "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
    "sched_setattr": 274, "renameat2": 276, "seccomp": 277, "memfd_create": 279, "bpf": 280, "execveat": 281,
    "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip

TABLES = {
    "x86_64": Table(0xC000003E, frozenset({**_NEW, **_X86_64}.values()), _UNKNOWN, {2: 1, 257: 2}),
    "aarch64": Table(0xC00000B7, frozenset({**_NEW, **_AARCH64}.values()), _UNKNOWN, {56: 2}),
}
