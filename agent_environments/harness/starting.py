"""Starts the program of an episode: by a command, or as an agent that an installed package knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agent_environments.harness.agents import Start, TaskFiles, find_agent, require_installed
from agent_environments.harness.words import require_program, require_script, resolved
from agent_environments.program_protocol import Connection


class Starter(Protocol):
    """Starts programs. ``command``: the words that begin each start; ``least_context``: tokens of context in which
    the program can work, 0 where that is not known."""

    command: list[str]
    least_context: int

    def check(self, task_ids: Sequence[str], path: str | None) -> None:
        """Raise FileNotFoundError or ValueError where a program or the files of a task are missing."""

    def start_of(self, task_id: str, connection: Connection) -> Start:
        """Return how the program of an episode is started."""


@dataclass
class CommandStarter:
    """Starts the same command for each episode."""

    command: list[str]
    task_files: TaskFiles | None
    least_context: int = 0

    def check(self, task_ids: Sequence[str], path: str | None) -> None:
        """Check as :class:`Starter` does."""
        require_program("command", self.command, path)
        folders = [] if self.task_files is None else [*map(self.task_files.of, task_ids)]
        require_script("command", self.command, "it starts with the files of its task alone", folders)

    def start_of(self, task_id: str, connection: Connection) -> Start:
        """Return the start as :class:`Starter` does."""
        return Start(self.command)


class AgentStarter:
    """Starts an agent by its name, with the prompt of the task's folder.

    Args:
        program: the path of the agent's program, None for its usual place.
        prefix: a command under which the program runs.

    Raises:
        ValueError: no installed package has an agent of this name.
    """

    def __init__(self, name: str, program: str | None, prefix: Sequence[str], task_files: TaskFiles) -> None:
        self._name, self._agent, self._task_files = name, find_agent(name), task_files
        own = resolved([os.path.expanduser(program or self._agent.program)])
        self._program = own[0]
        self.command = [*prefix, *own]
        self.least_context = self._agent.least_context

    def check(self, task_ids: Sequence[str], path: str | None) -> None:
        """Check as :class:`Starter` does."""
        require_installed(self._name, self._agent, self._program, path)
        require_program("command", self.command, path)
        for task_id in task_ids:
            self._task_files.prompt(task_id)

    def start_of(self, task_id: str, connection: Connection) -> Start:
        """Return the start as :class:`Starter` does."""
        start = self._agent.start(connection, self._task_files.prompt(task_id))
        return replace(start, command=[*self.command, *start.command])
