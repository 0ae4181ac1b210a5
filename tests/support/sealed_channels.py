"""Two sealed processes, as the interpreters of two episodes are, try to tell each other something.

Run as a program with the folder of sandbox.py and a role. ``hear`` prints "ready", waits for a word, and prints
as JSON whether one came; ``tell`` gives the word and prints how many heard it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import sys
import time
from typing import Any

FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
FUTEX_WAIT, FUTEX_WAKE = 0, 1
PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def library_pages() -> list[int]:
    """Addresses of a page of the same library, mapped for sharing and privately; those that could be had."""
    file = os.open(os.__file__, os.O_RDONLY)
    pages = [
        _libc.mmap(None, ctypes.c_size_t(PAGE), mmap.PROT_READ, kind, file, ctypes.c_long(0))
        for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE)
    ]
    return [page for page in pages if page not in (None, ctypes.c_void_p(-1).value)]


def hear() -> bool:
    """Return whether somebody woke us; returns as soon as we may not even wait."""
    pages = library_pages()
    half_a_second = (ctypes.c_long * 2)(0, 500_000_000)
    print("ready", flush=True)
    while True:
        waited = [_futex(page, FUTEX_WAIT, ctypes.c_int.from_address(page).value, half_a_second) for page in pages]
        if 0 in waited:
            return True
        if -errno.ETIMEDOUT not in waited:
            return False


def tell() -> int:
    """How many were woken; gives up where it may not wake."""
    pages = library_pages()
    while True:
        woken = [_futex(page, FUTEX_WAKE, 100, None) for page in pages]
        if not any(each == 0 for each in woken):
            return max(0, *woken)
        time.sleep(0.01)


def _futex(page: int, operation: int, value: int, timeout: Any) -> int:
    """What the call gives; the error's number below zero."""
    result: int = _libc.syscall(FUTEX, ctypes.c_void_p(page), operation, value, timeout, None, 0)
    return result if result >= 0 else -ctypes.get_errno()


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    import sandbox

    sandbox.confine({"level": "seccomp", "memory_mb": 256})
    print(json.dumps({"hear": hear, "tell": tell}[sys.argv[2]]()), flush=True)


if __name__ == "__main__":
    main()
