"""Whole agents by name: how to start a third party's program so that the policy answers it.

A package adds one by an entry point of the group ``torchtune_loop.agents``, which names an :class:`Agent`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent_environments.harness.home import copy_tree
from agent_environments.program_protocol import Connection
from loop_plumbing.breakage import raised_as
from loop_plumbing.names import did_you_mean, similar_names
from loop_plumbing.plug_ins import load, plug_ins

PROMPT = "prompt.md"
"""The file of a task's folder that holds the agent's prompt."""
MAX_PROMPT_BYTES = (128 << 10) - 64
"""Linux passes no longer argument to a program (MAX_ARG_STRLEN), and an option stands before the prompt."""


@dataclass(frozen=True)
class Start:
    """How an episode's program starts: the command line (the program first), the environment variables, and the files
    that the program reads, by their paths in its home folder."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """An agent program that an installed package offers.

    ``program`` is a name on PATH, or a path relative to the folder in which the node starts. The command ``install``
    installs the tested version. ``least_context`` is the number of context tokens that hold the program's first prompt
    and some work. ``start(connection, prompt)`` returns how an episode starts, without the program itself.
    """

    program: str
    install: str
    least_context: int
    start: Callable[[Connection, str], Start]


def find_agent(name: str) -> Agent:
    """Return the agent of this name.

    Raises:
        ValueError: no installed package has the agent, or its import fails; the message lists similar and all names.
    """
    known = plug_ins("agents")
    if name not in known:
        near = similar_names(name, sorted(known))
        guess = f"{did_you_mean(near)} " if near else ""
        there = ", ".join(sorted(known)) or "none (torchtune-loop-contrib has some)"
        raise ValueError(f"harness: no agent is called {name!r}: {guess}There are: {there}; or give a `command`")
    with raised_as(ValueError, f"harness: the agent {name} cannot be imported: ", ImportError, AttributeError):
        agent = load(known[name])
    if not isinstance(agent, Agent):
        raise ValueError(f"harness: the agent {name} must be an Agent, and {known[name]} is {agent!r}")
    return agent


def require_installed(name: str, agent: Agent, program: str, path: str | None) -> None:
    """Check that the agent's program is installed.

    Raises:
        FileNotFoundError: the program is not installed; the message names the command that installs it.
    """
    if shutil.which(program, path=path) is None:
        raise FileNotFoundError(
            f"harness: the agent {name} is not installed, there is no program {program}: {agent.install} "
            "(agent_program says where it is if not there)"
        )


class TaskFiles:
    """A folder that holds one folder for each task; an episode begins with the files of its task's folder."""

    def __init__(self, root: str) -> None:
        self.root = Path(root).expanduser().absolute()

    def of(self, task_id: str) -> Path:
        """Return the folder of a task.

        Raises:
            FileNotFoundError: the root holds no such folder; the message names the folder.
        """
        below = Path(task_id)
        if below.is_absolute() or ".." in below.parts or not (self.root / below).is_dir():
            raise FileNotFoundError(f"harness: task_files: the task {task_id!r} has no folder in {self.root}")
        return self.root / below

    def copy(self, task_id: str, folder: Path) -> None:
        """Copy the files of a task into ``folder``, which must exist."""
        copy_tree(self.of(task_id), folder)

    def prompt(self, task_id: str) -> str:
        """Return the prompt of a task's agent.

        Raises:
            FileNotFoundError: the task has no prompt. ValueError: the prompt cannot be a program's argument.
        """
        file = self.of(task_id) / PROMPT
        if not file.is_file():
            raise FileNotFoundError(f"harness: task_files: there is no {file}, which tells the agent its task")
        content = file.read_bytes()
        with raised_as(ValueError, f"harness: task_files: {file} is not UTF-8 text: ", UnicodeDecodeError):
            text = content.decode()
        if not text.strip() or "\0" in text or len(content) > MAX_PROMPT_BYTES:
            raise ValueError(
                f"harness: task_files: {file} must be a text of 1 to {MAX_PROMPT_BYTES} bytes without NULs, and has "
                f"{len(content)} bytes: put longer texts into a file beside it"
            )
        return text


def write_files(home: Path, files: Mapping[str, str]) -> None:
    """Write the files of a start into a home folder; makes missing folders, and only the files' owner may read them."""
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link of the template leads to a file outside the home
        with open(path, "w", opener=lambda file, flags: os.open(file, flags, 0o600)) as written:
            written.write(text)
