"""The words of a command that a harness starts in a folder of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence


def found(command: Sequence[str]) -> list[str]:
    """Return the command with ``{python}`` as this interpreter and files as absolute paths."""

    def is_path(word: str, is_program: bool) -> bool:
        if "/" in word:
            return os.path.exists(word)
        return os.path.isfile(word) and not is_program  # a program of a bare name is looked for on PATH

    words = [sys.executable if word == "{python}" else word for word in command]
    return [os.path.abspath(word) if is_path(word, number == 0) else word for number, word in enumerate(words)]


def require_program(key: str, command: Sequence[str], path: str | None = None) -> None:
    """Raise FileNotFoundError where the command's program is not on ``path``, None for this process's own."""
    if shutil.which(command[0], path=path) is None:
        raise FileNotFoundError(f"harness: {key} cannot be run: there is no program {command[0]}")
