"""The words of a command that a harness starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from loop_plumbing.names import did_you_mean, similar_names

# Only few programs are checked: a word that merely looks like a file must not refuse a command.
INTERPRETER = re.compile(r"(ba|da|z)?sh|python[\d.]*|node|perl|ruby")
"""Programs whose first argument is the file that they run."""
RUNNERS = ("env", "ionice", "nice", "nohup", "setsid", "stdbuf", "time", "timeout")
"""Programs that run another one in the same folder."""
FLAGS = re.compile("-[bBdEIiOPqsSuvx]+")
"""Options of these programs that do not take the file's place."""


def resolved(command: Sequence[str]) -> list[str]:
    """Return the command with ``{python}`` replaced by this interpreter and existing files by their absolute paths."""

    def is_path(word: str, is_program: bool) -> bool:
        if "/" in word:
            return os.path.exists(word)
        return os.path.isfile(word) and not is_program  # a program of a bare name is looked for on PATH

    words = [sys.executable if word == "{python}" else word for word in command]
    return [os.path.abspath(word) if is_path(word, number == 0) else word for number, word in enumerate(words)]


def require_script(key: str, command: Sequence[str], why: str, folders: Iterable[Path] = ()) -> None:
    """Raise FileNotFoundError if an interpreter's script is not a file here and not in each of ``folders``, where the
    command starts. ``why`` states the consequence. A script behind a program such as a container's is not checked.
    """
    place = next((n for n, word in enumerate(command) if INTERPRETER.fullmatch(os.path.basename(word))), len(command))
    if place and os.path.basename(command[0]) not in RUNNERS:
        return
    script = next((word for word in command[place + 1 :] if not FLAGS.fullmatch(word)), "-")
    there = [folder / script for folder in folders] or [Path(script)] * os.path.isabs(script)
    if script[:1] != "-" and not (there and all(path.exists() for path in there)):
        near = similar_names(script, sorted(os.listdir()))
        cure = f"; {did_you_mean(near)}" if near else ""
        raise FileNotFoundError(f"harness: {key}: there is no file {script!r} here{cure}; {why}")


def require_program(key: str, command: Sequence[str], path: str | None = None) -> None:
    """Raise FileNotFoundError if the command's program is not on ``path``; None stands for this process's PATH."""
    if shutil.which(command[0], path=path) is None:
        raise FileNotFoundError(f"harness: {key} cannot be run: there is no program {command[0]}")
