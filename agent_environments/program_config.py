"""The config of a program: its command and its variables, which YAML may have read as something else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any


def words(key: str, value: Any) -> list[str]:
    """A list of words, whole numbers among them as text.

    Raises:
        ValueError: it is one text, or something that is no word; names ``key`` and the cure.
    """
    if isinstance(value, str):
        raise ValueError(f"{key} must be a list of words: write {json.dumps(shlex.split(value))}, not {value!r}")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list of words, not {value!r}")
    return [_text(key, word) for word in value]


def variables(key: str, value: Any) -> dict[str, str]:
    """Environment variables, whole numbers among them as text.

    Raises:
        ValueError: it is no mapping of such values; names ``key`` and the cure.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping of names to texts, not {value!r}")
    return {_text(key, name): _text(f"{key}.{name}", each) for name, each in value.items()}


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        # Of 1.1 and True nobody knows whether 1.10 and YES were meant.
        raise ValueError(f"{key} holds {value!r}, which is not a text: put quotes around what is meant")
    return str(value)
