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
"""The errors of reading a line that may be any JSON, or not JSON at all."""


def sound_lines(
    path: Path, what: str, read: Callable[[bytes], T], damage: list[str], start: int = 0, number: int = 1
) -> Iterator[tuple[WholeLine, T | None]]:
    """Yield each whole line with the result of ``read``; None for a damaged line, which is added to ``damage`` once.

    Args:
        what: the kind of line, such as "rollout", for ``damage``.
        start, number: as in :func:`whole_lines`.
    """
    for line in whole_lines(path, start, number):
        try:
            value = read(line.text)
        except UNREADABLE as error:
            value, problem = None, damage_of(path, line.number, what, error)
            if problem not in damage:
                damage.append(problem)
        yield line, value


def json_object(text: bytes) -> dict[str, Any]:
    """Read a line as a JSON object; raises ValueError for any other line."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def damage_of(path: Path, number: int, what: str, error: Exception) -> str:
    """Return one line that names a damaged line and tells how to mend it."""
    return f"{path}, line {number}, is not a {what}: {error_line(error)}; {DAMAGE_CURE}"


def first_of(damage: list[str]) -> str:
    """Return text on the first damaged line and the number of further damaged lines."""
    return damage[0] + (f" (and {len(damage) - 1} more damaged lines)" if len(damage) > 1 else "")
