"""Exit statuses of commands, and how those end that resume when they are run again."""

from __future__ import annotations

import sys
from collections.abc import Callable

GOES_ON = "the same command goes on from here"


def interrupted(program: str, *then: str) -> int:
    """Print that ``program`` was stopped by Ctrl-C, and further text; return 130, the status of such programs."""
    print("; ".join([f"{program}: stopped", *then]), file=sys.stderr)
    return 130


def exit_status(program: str, work: Callable[[], str], errors: tuple[type[Exception], ...]) -> int:
    """Do ``work``, print its result, return 0. On one of ``errors``, print a line on stderr, return 1; on Ctrl-C, 130.
    A ``KeyboardInterrupt`` with a text needs no line: the work has printed one."""
    try:
        print(work())
    except errors as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        return 130 if error.args else interrupted(program, GOES_ON)
    return 0
