"""Starts the program of an episode: by a command, or as an agent that an installed package knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from agent_environments.harness.agents import Start, TaskFiles, find_agent, require_installed
from agent_environments.harness.words import require_program, require_script, resolved
from agent_environments.program_protocol import Connection


class Starter:
    """Starts the same command for each episode.

    ``command`` holds the words of the command line. ``least_context`` is the number of context tokens that the program
    needs; 0 if unknown.
    """

    least_context = 0

    def __init__(self, command: list[str], task_files: TaskFiles | None) -> None:
        self.command = command
        self._task_files = task_files

    def check(self, task_ids: Sequence[str], path: str | None) -> None:
        """Raise FileNotFoundError or ValueError if a program or the files of a task are missing."""
        require_program("command", self.command, path)
        folders = [] if self._task_files is None else [*map(self._task_files.of, task_ids)]
        require_script("command", self.command, "it starts with the files of its task alone", folders)

    def start_of(self, task_id: str, connection: Connection) -> Start:
        """Return how to start the program of an episode."""
        return Start(self.command)


class AgentStarter(Starter):
    """Starts an agent by its name, with the prompt of the task's folder.

    Args:
        program: the path of the agent's program; None for the program's usual place.
        prefix: a command under which the program runs.

    Raises:
        ValueError: no installed package has an agent of this name.
    """

    def __init__(self, name: str, program: str | None, prefix: Sequence[str], task_files: TaskFiles) -> None:
        self._name, self._agent, self._prompt_of = name, find_agent(name), task_files.prompt
        own = resolved([os.path.expanduser(program or self._agent.program)])
        self._program = own[0]
        super().__init__([*prefix, *own], task_files)
        self.least_context = self._agent.least_context

    def check(self, task_ids: Sequence[str], path: str | None) -> None:
        require_installed(self._name, self._agent, self._program, path)
        require_program("command", self.command, path)
        for task_id in task_ids:
            self._prompt_of(task_id)

    def start_of(self, task_id: str, connection: Connection) -> Start:
        start = self._agent.start(connection, self._prompt_of(task_id))
        return replace(start, command=[*self.command, *start.command])
