"""Forks the interpreters: a process that has never held a database, so that they cannot have inherited any of one.

It is forked from the world server when that is warm and before that loads the databases. World processes ask it for
an interpreter by passing one end of a socket pair; the interpreter joins the asking process's group, and dies with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import traceback
from collections.abc import Sequence
from typing import Any

import opened_files
import sandbox
from channel import Channel

MAX_REQUEST = 1 << 16


class InterpreterServer:
    """The handle that the world server and its children have on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._asking, self._serving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._serve()
        self._serving.close()

    @property
    def descriptor(self) -> int:
        """What a child must keep open to be able to ask."""
        return self._asking.fileno()

    def ask(self, task_id: str, options: dict[str, Any]) -> Channel:
        """A channel to a new interpreter in this process's group."""
        ours, theirs = socket.socketpair()
        request = {"task_id": task_id, "options": options, "group": os.getpid()}
        socket.send_fds(self._asking, [json.dumps(request).encode()], [theirs.fileno()])
        theirs.close()
        self._asking.close()
        return Channel(ours.detach())

    def _serve(self) -> None:
        try:
            sandbox.die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _silence((0, 1))
            sandbox.close_descriptors_except({0, 1, 2, self._serving.fileno()})
            opened_files.install()
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
                    _silence((0, 1, 2))

                    from interpreter import run_interpreter

                    run_interpreter(Channel(descriptors[0]), request["task_id"], request["options"], self._settings)
                os.close(descriptors[0])
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)


def _silence(descriptors: Sequence[int]) -> None:
    """Let each be /dev/null, opened for this process alone: an open file has an owner, flags and locks to share."""
    for descriptor in descriptors:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, descriptor)
        os.close(null)


def _reap() -> None:
    """Those that have ended. Not left to the kernel, which would forget the processor time they used."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
