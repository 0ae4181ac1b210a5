"""Reads the lines of a run's files so that one damaged line costs one line, and is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from loop_formats.run_files import DAMAGE_CURE, WholeLine, whole_lines
from loop_plumbing.breakage import error_line

T = TypeVar("T")
UNREADABLE = (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, RecursionError)
"""What the reading of a line raises that is any JSON, or none, until it was read."""


def sound_lines(
    path: Path, what: str, read: Callable[[bytes], T], damage: list[str], start: int = 0, number: int = 1
) -> Iterator[tuple[WholeLine, T | None]]:
    """Yield each whole line with what ``read`` makes of it, None for a damaged one, which ``damage`` then names once.

    Args:
        what: a line should be, such as "rollout".
        start, number: as of :func:`whole_lines`.
    """
    for line in whole_lines(path, start, number):
        try:
            found = read(line.text)
        except UNREADABLE as error:
            found, said = None, damage_of(path, line.number, what, error)
            if said not in damage:
                damage.append(said)
        yield line, found


def json_object(text: bytes) -> dict[str, Any]:
    """Read a line as a JSON object; raises ValueError where it is none."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def damage_of(path: Path, number: int, what: str, error: Exception) -> str:
    """Name a damaged line with its cure, in one line."""
    return f"{path}, line {number}, is no {what}: {error_line(error)}; {DAMAGE_CURE}"


def first_of(damage: list[str]) -> str:
    """Return the first, and how many more there are."""
    return damage[0] + (f" (and {len(damage) - 1} more damaged lines)" if len(damage) > 1 else "")
