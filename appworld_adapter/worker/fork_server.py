"""A warm parent that forks one child per connection: the world server and the grader server.

Run by path under the AppWorld interpreter: ``python fork_server.py '<json>'`` with

    role            "world" or "grader"
    socket          path of the Unix socket to listen on (mode 0600)
    warm_up_task    task whose world is made and closed once, so that children inherit everything imported and cached
    settings        given to every child (see world.py and grader.py)

Stdin is the lifeline: when it ends, because the owner stopped or was killed, the server and all children die. It also
carries ``{"op": "kill", "pid": n}``. Stdout carries ``{"event": "ready", ...}`` and ``{"event": "exit", ...}``.

A child leads a process group of its own and is sent SIGKILL by the kernel when the server dies; when a child ends, for
whatever reason, its whole group is killed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(1, os.path.abspath(os.path.join(__file__, "../../../agent_environments/sandbox")))

import sandbox
from channel import Channel, ChannelClosed, ChannelGarbage

if TYPE_CHECKING:
    from interpreter_server import InterpreterServer


class ForkServer:
    """Accepts connections and forks ``serve(connection)`` for each; single-threaded, so that forking is safe."""

    def __init__(
        self, socket_path: str, control: Channel, serve: Callable[[Channel], None], helper: InterpreterServer | None
    ) -> None:
        self._serve = serve
        self._helper = helper
        self._children: set[int] = set()
        self._control = control
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path)
        previous = os.umask(0o177)
        self._listener.bind(socket_path)
        os.umask(previous)
        self._listener.listen(512)
        self._listener.setblocking(False)
        # SIGCHLD interrupts nothing by itself in Python: it writes a byte here, which wakes the poll below.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def run(self, ready: dict[str, Any]) -> None:
        """Serves until stdin ends."""
        self._control.send({"event": "ready", **ready})
        poller = select.poll()
        for descriptor in (0, self._listener.fileno(), self._wake_read):
            poller.register(descriptor, select.POLLIN | select.POLLHUP)
        while True:
            events = dict(poller.poll())
            if self._wake_read in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            self._reap()
            try:
                if 0 in events:
                    self._obey(self._control.receive())
                while self._control.has_pending:
                    self._obey(self._control.receive())
            except (ChannelClosed, ChannelGarbage):
                self._kill_all()
                return
            if self._listener.fileno() in events:
                self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        try:
            pid = os.fork()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            connection.close()  # the owner sees the end of the stream and tries again later
            return
        if pid:
            connection.close()
            # Also done by the child; whoever comes first, the group exists before anyone wants to kill it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._children.add(pid)
            return
        self._be_child(connection)

    def _be_child(self, connection: socket.socket) -> None:
        status = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            sandbox.die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            descriptor = os.dup(connection.detach())
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1):
                os.dup2(null, standard)
            kept = {self._helper.descriptor} if self._helper else set()
            sandbox.close_descriptors_except({0, 1, 2, descriptor} | kept)
            owner = Channel(descriptor)
            owner.send({"pid": os.getpid()})  # with which the owner can have this child killed
            self._serve(owner)
            status = 0
        except ChannelClosed:
            status = 0  # the owner hung up
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def _obey(self, message: dict[str, Any]) -> None:
        pid = message.get("pid")
        if message.get("op") == "kill" and pid in self._children:
            _kill_group(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._helper and pid == self._helper.pid:
                raise SystemExit("the interpreter server died")
            self._children.discard(pid)
            _kill_group(pid)
            with contextlib.suppress(ChannelClosed):
                self._control.send({"event": "exit", "pid": pid, "status": status})

    def _kill_all(self) -> None:
        for pid in self._children:
            _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    # Only the control channel may write to what is stdout now: what the engine prints goes to stderr, which is the log.
    control = Channel(0, os.dup(1))
    os.dup2(2, 1)
    if arguments["role"] == "world":
        from world import WorldServer as Server
    else:
        from grader import GraderServer as Server
    server = Server(arguments["settings"])
    ready = server.warm_up(arguments["warm_up_task"])
    gc.collect()
    gc.freeze()
    sandbox.undumpable()
    ForkServer(arguments["socket"], control, server.serve, server.helper).run(ready)


if __name__ == "__main__":
    main()
