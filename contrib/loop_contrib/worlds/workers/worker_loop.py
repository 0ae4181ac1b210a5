"""Runs a worker: makes a world, and forks a process for each episode, which answers requests as JSON lines.

    python textcraft_world.py MEMORY_MB ... SOCKET

Runs under the world's own interpreter, so it imports the standard library only. A worker file lies in
this folder, holds a :class:`WorkerWorld` and ends in ``serve(ThatWorld)``.

A request is ``{"op": ..., ...}``, and gets one answer, ``{"ok": {...}}`` or ``{"error": "..."}``:

=======  ========================  =====================================
op       fields                    answer
=======  ========================  =====================================
tasks                              ``splits``: split -> task ids; ``tools``: schemas;
                                   ``notes``: facts that a user should know
start    episode, task             ``instructions``, ``observation``, ``tools``
step     episode, command          ``observation``, ``done``, ``failed``
grade    episode                   ``reward`` in [0, 1], ``success``
expert   task                      ``commands``: a solution of the task
close    episode
=======  ========================  =====================================

``episode`` is a number that the client chooses.

A world of tools has ``tools``, JSON schemas in the form of OpenAI's API. Its command is a JSON list of the calls and
mistakes in an agent's turn, its observation a JSON list with an item for each:

==============================  ========================================
in the command                  in the observation
==============================  ========================================
``{"name", "arguments"}``       ``{"result": ...}`` or ``{"error": ...}``
``{"mistake": ...}``, no call   the same
==============================  ========================================
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

CHILD_DEATH_SHOWS_S = 1.0


@dataclass(frozen=True)
class Step:
    """The world's answer to one command. ``failed`` says that the command could not be carried out."""

    observation: str
    done: bool
    failed: bool = False


class WorkerEpisode(Protocol):
    """A task being played. ``opening`` is the first observation: the task and what the agent sees."""

    opening: str

    def step(self, command: str) -> Step: ...

    def grade(self) -> tuple[float, bool]:
        """Return (reward in [0, 1], success) for the state reached so far."""

    def close(self) -> None:
        """Release what the episode holds. This base class holds nothing."""


class WorkerWorld(Protocol):
    """A kind of world. ``instructions`` tell the agent what it can do; they are the same for all tasks. The pool adds
    how a turn gives its command.

    A world with tool calls also has ``tools``, the schemas of its tools. A world that checks its own tasks also has
    ``notes()``, sentences for the user. The world is made once, before processes are forked from it. A world that
    starts a JVM must set ``forkable = False`` and is made in each process.
    """

    instructions: str

    def tasks(self) -> dict[str, list[str]]:
        """Return split -> task ids of the form ``<scenario>_<n>``, always in the same order."""

    def start(self, task: str) -> WorkerEpisode: ...

    def expert(self, task: str) -> list[str]:
        """Return commands that solve the task, as far as the world's own expert can."""


class Worker:
    """Answers requests about one world."""

    def __init__(self, world: WorkerWorld) -> None:
        self._world = world
        self._episodes: dict[int, WorkerEpisode] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "tasks": self._tasks,
            "start": self._start,
            "step": lambda request: asdict(self._episodes[request["episode"]].step(request["command"])),
            "grade": self._grade,
            "expert": lambda request: {"commands": self._world.expert(request["task"])},
            "close": self._close,
        }
        try:
            return {"ok": operations[request["op"]](request)}
        except Exception as error:  # of the world, which may be any: the client decides what it means
            if killed_child():
                os.kill(os.getpid(), signal.SIGKILL)  # this is not an error of the world's, but the machine's doing
            return {"error": f"{type(error).__name__}: {error}"[:1000]}

    def _tasks(self, request: dict[str, Any]) -> dict[str, Any]:
        notes = getattr(self._world, "notes", list)()
        return {"splits": self._world.tasks(), "tools": getattr(self._world, "tools", []), "notes": notes}

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        episode = self._episodes[request["episode"]] = self._world.start(request["task"])
        tools = getattr(episode, "tools", [])  # of this task alone
        return {"instructions": self._world.instructions, "observation": episode.opening, "tools": tools}

    def _grade(self, request: dict[str, Any]) -> dict[str, Any]:
        reward, success = self._episodes[request["episode"]].grade()
        return {"reward": reward, "success": success}

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        episode = self._episodes.pop(request["episode"], None)
        if episode is not None:
            episode.close()
        return {}


def killed_child() -> bool:
    """Return whether SIGKILL ended a child, such as a JVM. This shows a moment after the child's pipes have ended."""
    give_up = time.monotonic() + CHILD_DEATH_SHOWS_S
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:  # there is none; or this process is sealed
            return False
        if ended is not None or time.monotonic() > give_up:
            return ended is not None and ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGKILL
        time.sleep(0.05)


def serve(world_class: Callable[[], WorkerWorld]) -> None:
    """Fork processes until the owner closes the connection (:mod:`loop_plumbing.fork_server`).

    ``argv[1]`` is the memory limit in MB of each process and each of its children. It limits data, not addresses,
    because a JVM reserves far more addresses than it uses.
    """
    # Behind the packages of this interpreter.
    sys.path.append(next(str(folder) for folder in Path(__file__).parents if (folder / "loop_plumbing").is_dir()))
    from loop_plumbing import fork_server

    limit = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.dup2(2, 1)  # packages print what they like

    def prepare() -> fork_server.Prepared:
        forkable = getattr(world_class, "forkable", True)
        world = world_class() if forkable else None
        return fork_server.Prepared(fork_server.answers(lambda: Worker(world or world_class()).answer))

    fork_server.serve(socket.socket(fileno=int(sys.argv[-1])), prepare)
    os._exit(0)  # without the packages' own shutdown; the guard ends what is left
