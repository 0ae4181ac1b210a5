"""The config of a program: its command and its variables, which YAML may have read as something else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any


def words(key: str, value: Any) -> list[str]:
    """A list of words, numbers among them as text.

    Raises:
        ValueError: it is one text, or something that is no word; names ``key`` and the cure.
    """
    if isinstance(value, str):
        raise ValueError(f"{key} must be a list of words: write {json.dumps(shlex.split(value))}, not {value!r}")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list of words, not {value!r}")
    return [_text(key, word) for word in value]


def variables(key: str, value: Any) -> dict[str, str]:
    """Environment variables, numbers and truth values as the text that YAML read them from.

    Raises:
        ValueError: it is no mapping of such values; names ``key`` and the cure.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping of names to texts, not {value!r}")
    return {_text(key, name): _text(f"{key}.{name}", each) for name, each in value.items()}


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise ValueError(f"{key} holds {value!r}, which is no text: put it in quotes")
    return str(value)
