"""Exit statuses of commands, and how those end that resume when they are run again."""

from __future__ import annotations

import sys
from collections.abc import Callable

GOES_ON = "the same command goes on from here"


class StoppedAsAsked(KeyboardInterrupt):
    """Raised in place of KeyboardInterrupt if a command on this terminal stopped as asked, and printed how to go on."""


def interrupted(program: str, *then: str) -> int:
    """Print that ``program`` was stopped by Ctrl-C, and further text; return 130, the status of such programs."""
    print("; ".join([f"{program}: stopped", *then]), file=sys.stderr)
    return 130


def exit_status(program: str, work: Callable[[], str], errors: tuple[type[Exception], ...]) -> int:
    """Do ``work``, print its result, return 0. On one of ``errors`` print a line and return 1, on Ctrl-C return 130."""
    try:
        print(work())
    except errors as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except StoppedAsAsked:
        return 130
    except KeyboardInterrupt:
        return interrupted(program, GOES_ON)
    return 0
