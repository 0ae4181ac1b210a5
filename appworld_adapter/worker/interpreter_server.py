"""Forks the interpreters: a process that has never held a database, so that they cannot inherit data of one.

It is forked from the world server before that opens its first world, and warms up by itself, with a shell whose API
calls go nowhere: an app's answers would stay in its memory. World processes ask it for an interpreter by
passing one end of a socket pair; the interpreter joins the asking process's group, and dies with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import traceback
from collections.abc import Sequence
from typing import Any

import opened_files
import sandbox
from channel import Channel

MAX_REQUEST = 1 << 16
WARM = b"warm"


class InterpreterServer:
    """A handle with which the world server and its children use the interpreter server."""

    def __init__(
        self, settings: dict[str, Any], task_id: str, options: dict[str, Any], programs: Sequence[str]
    ) -> None:
        """Fork the server, which runs ``programs`` on the given task, with the given engine options, as its warm-up."""
        self._settings = settings
        self._asking, self._serving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._serve(task_id, options, programs)
        self._serving.close()

    def wait_until_warm(self) -> None:
        """Wait for the warm-up; raises RuntimeError if the server died, for a reason that its log states."""
        if self._asking.recv(MAX_REQUEST) != WARM:
            raise RuntimeError("the interpreter server died while it warmed up")

    @property
    def descriptor(self) -> int:
        """The file descriptor that a child must keep open to call :meth:`ask`."""
        return self._asking.fileno()

    def ask(self, task_id: str, options: dict[str, Any]) -> Channel:
        """Ask the server for a new interpreter in this process's group; return a channel to it."""
        ours, theirs = socket.socketpair()
        request = {"task_id": task_id, "options": options, "group": os.getpid()}
        socket.send_fds(self._asking, [json.dumps(request).encode()], [theirs.fileno()])
        theirs.close()
        self._asking.close()
        return Channel(ours.detach())

    def _serve(self, task_id: str, options: dict[str, Any], programs: Sequence[str]) -> None:
        try:
            sandbox.die_with_parent()
            sandbox.silence((0, 1))
            sandbox.close_descriptors_except({0, 1, 2, self._serving.fileno()})
            opened_files.install()
            _warm_up(task_id, options, programs, self._settings["output_limit"])
            self._serving.send(WARM)
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._serving, MAX_REQUEST, 1)
                if not message:
                    break
                _reap()
                request = json.loads(message)
                try:
                    pid = os.fork()
                except OSError:  # no memory for another one: the world that asked sees the end of its stream
                    os.close(descriptors[0])
                    continue
                if pid == 0:
                    self._serving.close()
                    os.setpgid(0, request["group"])  # fails if the asking process is gone already
                    sandbox.silence((0, 1, 2))

                    from interpreter import run_interpreter

                    run_interpreter(Channel(descriptors[0]), request["task_id"], request["options"], self._settings)
                os.close(descriptors[0])
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)


class _Nowhere:
    """Stand in for a channel to a world process; knows no app."""

    def send(self, message: dict[str, Any]) -> None:
        self._number = message["id"]

    def receive(self) -> dict[str, Any]:
        return {"id": self._number, "status": 404, "headers": [], "body": json.dumps({"message": "No app found."})}


def _warm_up(task_id: str, options: dict[str, Any], programs: Sequence[str], output_limit: int) -> None:
    """Import the modules and fill the caches that interpreters need at their first steps."""
    import clock
    import interpreter
    from appworld import AppWorld

    world = interpreter.make_world(_Nowhere(), task_id, options, output_limit)
    for program in programs:
        interpreter.execute(world, program)
    AppWorld.close_all()
    clock.freeze()
    gc.collect()
    gc.freeze()


def _reap() -> None:
    """Collect interpreters that have ended; otherwise the kernel would forget their processor time."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
