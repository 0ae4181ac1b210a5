"""Ends commands that resume when they are run again."""

from __future__ import annotations

import sys
from collections.abc import Callable


def exit_status(program: str, work: Callable[[], str], errors: tuple[type[Exception], ...]) -> int:
    """Do ``work``, print its result, return 0. On one of ``errors`` or Ctrl-C, print a line on stderr, return 1."""
    try:
        print(work())
    except errors as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: stopped; the same command goes on from here", file=sys.stderr)
        return 1
    return 0
