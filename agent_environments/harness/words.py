"""The words of a command that a harness starts in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

from loop_plumbing.names import did_you_mean, similar_names

INTERPRETER = re.compile(r"(ba|da|z)?sh|python[\d.]*|node")
"""Programs whose first word is the file that they run."""
RUNNERS = ("env", "ionice", "nice", "nohup", "setsid", "stdbuf", "time", "timeout")
"""Programs that run another one in the same folder."""
FLAGS = re.compile("-[bBdEIiOPqsSuvx]+")
"""Options of these that are followed by the file all the same."""


def found(command: Sequence[str]) -> list[str]:
    """Return the command with ``{python}`` as this interpreter and files as absolute paths."""

    def is_path(word: str, is_program: bool) -> bool:
        if "/" in word:
            return os.path.exists(word)
        return os.path.isfile(word) and not is_program  # a program of a bare name is looked for on PATH

    words = [sys.executable if word == "{python}" else word for word in command]
    return [os.path.abspath(word) if is_path(word, number == 0) else word for number, word in enumerate(words)]


def missing_script(command: Sequence[str]) -> str | None:
    """Return the script of the command's interpreter if it is not a file here, so that it would be looked for in the
    folder in which the command starts; else None, also behind a program that may change the folder, as containers."""
    for place, word in enumerate(command):
        if INTERPRETER.fullmatch(os.path.basename(word)):
            script = next((each for each in command[place + 1 :] if not FLAGS.fullmatch(each)), "-")
            return None if script.startswith("-") or (os.path.isabs(script) and os.path.exists(script)) else script
        if place == 0 and os.path.basename(word) not in RUNNERS:
            return None
    return None


def not_here(key: str, script: str) -> str:
    """Return the beginning of a message on a script that is missing: what was meant, or that there is none."""
    near = similar_names(script, sorted(os.listdir()))
    return f"harness: {key}: there is no file {script!r} here" + (f"; {did_you_mean(near)}" if near else "")


def require_program(key: str, command: Sequence[str], path: str | None = None) -> None:
    """Raise FileNotFoundError where the command's program is not on ``path``, None for this process's own."""
    if shutil.which(command[0], path=path) is None:
        raise FileNotFoundError(f"harness: {key} cannot be run: there is no program {command[0]}")
