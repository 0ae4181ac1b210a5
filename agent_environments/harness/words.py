"""The words of a command that a harness starts in a folder of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from loop_plumbing.names import did_you_mean, similar_names

# An agent's command must not be refused for a word that only looks like a file: few programs are looked at.
INTERPRETER = re.compile(r"(ba|da|z)?sh|python[\d.]*|node")
"""Programs whose first word is the file that they run."""
RUNNERS = ("env", "ionice", "nice", "nohup", "setsid", "stdbuf", "time", "timeout")
"""Programs that run another one in the same folder."""
FLAGS = re.compile("-[bBdEIiOPqsSuvx]+")
"""Options of these that are followed by the file all the same."""

# A grader's command must not run a file of the agent's: whatever may be one is refused.
LANGUAGES = re.compile(r"(python|pypy|perl|ruby|php|lua)[\d.]*|node(js)?|deno|bun|tsx|luajit|Rscript|julia")
RUNS_A_FILE = re.compile(
    rf"{LANGUAGES.pattern}|(a|ba|c|da|fi|k|tc|z)?sh|pwsh|busybox|source|\.|tclsh|expect|[gm]?awk|make|java|dotnet"
)
"""Programs whose first word is the file that they run, or is looked for in one."""
PASSES_ON = re.compile(
    r"env|timeout|nice|ionice|nohup|stdbuf|setsid|taskset|chrt|time|exec|command|sudo|xargs|[{!]|if|then|else|do|\d.*|-.*"
)
"""Words of a shell that stand before a program."""
TAKES_LINE = re.compile(r"-[a-z]*c|-S|--command|--split-string")
TAKES_CODE = re.compile(r"-[a-z]*[cem]|--eval|--print")
TAKES_A_WORD = re.compile(r"-[WXoO]")
CLEARS_VARIABLES = {"sudo", "su", "doas", "runuser", "-i", "-", "--ignore-environment", "-E", "--reset-env"}
"""What leaves a Python without the variable by which it imports nothing from where it starts."""
CHANGES_FOLDER = ("-C", "--chdir", "--directory", "cd")
_ENDS = ";&|()`"
"""Signs of a shell between two commands."""
LOOKS_LIKE_A_FILE = re.compile(r"[^:]*/[^:]*|[^:]*\.[A-Za-z]\w*")


def found(command: Sequence[str]) -> list[str]:
    """Return the command with ``{python}`` as this interpreter and files as absolute paths."""

    def is_path(word: str, is_program: bool) -> bool:
        if "/" in word:
            return os.path.exists(word)
        return os.path.isfile(word) and not is_program  # a program of a bare name is looked for on PATH

    words = [sys.executable if word == "{python}" else word for word in command]
    return [os.path.abspath(word) if is_path(word, number == 0) else word for number, word in enumerate(words)]


def require_script(key: str, command: Sequence[str], why: str, folders: Iterable[Path] = ()) -> None:
    """Raise FileNotFoundError where the script of the command's interpreter is a file neither here nor in each of the
    ``folders`` in which it starts; ``why`` says what follows. A program before it, such as a container's, may know it.
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
    """Raise FileNotFoundError where the command's program is not on ``path``, None for this process's own."""
    if shutil.which(command[0], path=path) is None:
        raise FileNotFoundError(f"harness: {key} cannot be run: there is no program {command[0]}")


def run_from_folder(command: Sequence[str], in_shell: bool = False) -> str | None:
    """The first word by which a command runs a file of the folder that it starts in; None where there is none.

    Words after the first absolute path of a script or a program are its own, and may name what it reads.

    Args:
        in_shell: the command stands in a line of a shell, where a word that names a file is mostly read.
    """
    program, before, begins = "", "", in_shell
    for number, word in enumerate(command):
        value, name = word.rpartition("=")[2], os.path.basename(word)
        if LANGUAGES.fullmatch(program) and TAKES_CODE.fullmatch(before):
            earlier = {os.path.basename(each) for each in command[:number]}
            imports = CLEARS_VARIABLES & earlier and not any(re.fullmatch(r"-\w*[IP]\w*", each) for each in earlier)
            return word if program.startswith("py") and imports else None
        if TAKES_LINE.fullmatch(before):
            if (runs := _run_by_line(word)) is not None:
                return runs
            program, before = "", word
            continue
        runs_another = RUNS_A_FILE.fullmatch(name) or PASSES_ON.fullmatch(name)
        is_own = not runs_another and os.path.isfile(word) and (program or os.access(word, os.X_OK))
        if os.path.isabs(word) and number and (is_own or before in CHANGES_FOLDER):
            return None
        is_option = word.startswith("-") and "=" not in word and not re.match(r"-I[^/]", word)
        if not (is_option or os.path.isabs(value) or "$" in value or TAKES_A_WORD.fullmatch(before)):
            names_file = begins and "/" in value if in_shell else number and LOOKS_LIKE_A_FILE.fullmatch(value)
            if names_file or program:
                return word
        if RUNS_A_FILE.fullmatch(name):
            program = name
        begins = begins and ("=" in word or PASSES_ON.fullmatch(word) is not None)
        before = word
    return None


def _run_by_line(line: str) -> str | None:
    """As :func:`run_from_folder`, of a line of a shell, which may go to another folder by ``cd``."""
    lexer = shlex.shlex(line.replace("\n", ";"), posix=True, punctuation_chars=_ENDS)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # quotes that are open: the shell refuses them
        return None
    one: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= set(_ENDS):
            one.append(word)
        elif one[:1] == ["cd"] and os.path.isabs(one[-1]):
            return None
        elif (runs := run_from_folder(one, in_shell=True)) is not None:
            return runs
        else:
            one = []
    return None
