"""A server that prepares once and forks a process for each episode: code of the server and of its processes.

Nothing that happens in a process holds up another episode, or the owner. When a process ends, its memory, its folder
and the processes that it started go, too. The server runs below the owner (:mod:`loop_plumbing.forked_process`),
perhaps under another interpreter, so it needs the standard library only. They speak in messages of JSON over a socket:

    from the owner                          from the server
    {"fork": true}, one end of a socket     {"pid": n}, or {"error": why}
    and the clock (running_time)
    {"kill": pid}
    {"interrupt": pid}                      (the process gets SIGALRM)
    {"here": true}                          {"here": true}
                                            {"ready": ...}, or {"failed": why}, once
                                            {"ended": pid, "status": wait status}, once for each process

and the owner speaks with a process over the socket of its request, for instance in lines of JSON (:func:`answers`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from loop_plumbing import process_guard, running_time, written_tree
from loop_plumbing.breakage import error_line

MAX_MESSAGE = 1 << 16
MAX_LINE = 64 << 20
"""Most bytes of one answer of a process."""
TOO_LONG_ANSWER = b'{"raised": "its result is too long"}\n'


class DeadlinePassed(Exception):
    """The call did not end in time."""


class WrongArguments(Exception):
    """The function does not take these arguments; the message says which, and why."""


Answering = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers one request with {"result": ...}, or for an exception {"wrong": why}, {"late": how} or {"raised": what,
"place": where}."""


@dataclass(frozen=True)
class Prepared:
    """The outcome of the preparation, which every process inherits.

    Attributes:
        play: the work of a process, with the socket to its owner; the process ends when it returns.
        ready: JSON that the server sends to its owner.
        needs: process id -> name of the processes that the preparation started; if one of them ends, the server ends.
    """

    play: Callable[[socket.socket], None]
    ready: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[int, str] = field(default_factory=dict)


def answers(make: Callable[[], Answering]) -> Callable[[socket.socket], None]:
    """Return a ``play`` that answers the owner's requests (lines of JSON) until the owner hangs up.

    Args:
        make: called in the process; returns the function that answers a request.
    """

    def play(connection: socket.socket) -> None:
        answering = make()
        with os.fdopen(connection.detach(), "rb") as requests:  # a sealed process may not make the calls of sockets
            for line in requests:
                answer = json.dumps(answering(json.loads(line))).encode() + b"\n"
                sys.stdout.flush()
                rest = memoryview(answer if len(answer) < MAX_LINE else TOO_LONG_ANSWER)
                while rest:
                    rest = rest[os.write(requests.fileno(), rest) :]

    return play


def serve(control: socket.socket, prepare: Callable[[], Prepared]) -> None:
    """Prepare, then fork processes on request until the owner hangs up.

    Args:
        prepare: called once; if it raises, the server sends the reason to its owner.
    """
    process_guard.set_process_control(process_guard.PR_SET_CHILD_SUBREAPER, 1)
    try:
        prepared = prepare()
    except (Exception, SystemExit) as error:
        control.send(json.dumps({"failed": error_line(error)}).encode())
        return
    gc.collect()
    server = _Server(control, prepared)
    gc.freeze()
    sys.stdout.flush()
    server.run()


class _Server:
    def __init__(self, control: socket.socket, prepared: Prepared) -> None:
        self._control = control
        self._prepared = prepared
        self._processes: set[int] = set()
        self._prepared_processes = set(process_guard.descendants(os.getpid()))
        """Processes that the preparation started: they live as long as the server."""
        self._generators = _generators()
        self._folders = tempfile.mkdtemp(prefix="episodes-")
        # SIGCHLD interrupts nothing by itself in Python: it writes a byte here, which wakes the poll below.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def run(self) -> None:
        self._send({"ready": dict(self._prepared.ready)})
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            events = {descriptor for descriptor, _ in poller.poll()}
            if self._wake_read in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, MAX_MESSAGE)
            self._reap()  # first, so that only a server that lacks nothing answers below
            if self._control.fileno() not in events:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 2)
            if not message:
                for pid in self._processes:
                    _kill(pid)
                written_tree.remove(self._folders)
                return
            match json.loads(message):
                case {"fork": _}:
                    self._fork(*descriptors)
                case {"here": _}:
                    self._send({"here": True})
                case {"kill": int(pid)} if pid in self._processes:  # not reaped, so the number is nobody else's
                    _kill(pid)
                case {"interrupt": int(pid)} if pid in self._processes:
                    os.kill(pid, signal.SIGALRM)

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the owner has hung up, as the next message that is read shows
            self._control.send(json.dumps(message).encode())

    def _fork(self, descriptor: int, clock: int) -> None:
        server = os.getpid()
        try:
            if (pid := os.fork()) == 0:
                self._be_process(descriptor, clock, server)
        except OSError as error:  # no memory for another one
            return self._send({"error": str(error)})
        finally:
            os.close(descriptor)
            os.close(clock)
        with contextlib.suppress(OSError):  # the process does it, too: the first call counts
            os.setpgid(pid, pid)
        self._processes.add(pid)
        self._send({"pid": pid})

    def _be_process(self, descriptor: int, clock: int, server: int) -> NoReturn:
        status = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            process_guard.set_process_control(process_guard.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it died before the line above
                os._exit(1)
            # Processes that it starts stay below it, and come to the server when it has ended.
            process_guard.set_process_control(process_guard.PR_SET_CHILD_SUBREAPER, 1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._wake_read, self._wake_write):
                os.close(inherited)
            running_time.follow(clock)
            self._control.close()
            _have_own_folder(self._folder(os.getpid()))
            for generator in self._generators:
                _draw_afresh(generator)
            with socket.socket(fileno=descriptor) as connection:
                self._prepared.play(connection)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _folder(self, pid: int) -> str:
        return os.path.join(self._folders, str(pid))

    def _reap(self) -> None:
        """Collect the processes that have ended, and end the processes that each has left behind."""
        for pid, status in process_guard.reap().items():
            if pid in self._prepared.needs:
                raise SystemExit(f"{self._prepared.needs[pid]} has ended")
            if pid in self._processes:
                self._processes.remove(pid)
                _kill(pid, group_only=True)
                self._remove(self._folder(pid))
                self._send({"ended": pid, "status": status})
        for pid in self._strays():  # each may leave others, which come when it is collected
            _kill(pid)

    def _strays(self) -> list[int]:
        """Return the processes that became the server's children when their parents ended."""
        return [
            pid
            for pid in process_guard.children(os.getpid())
            if pid not in self._processes and pid not in self._prepared_processes and _group(pid) != os.getpgrp()
        ]

    def _remove(self, folder: str) -> None:
        """Remove an episode's folder; if the folder is not empty, do so in another process."""
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            pass
        except OSError:  # the folder is not empty
            with contextlib.suppress(OSError):
                if os.fork() == 0:
                    self._control.close()
                    try:
                        written_tree.remove(folder)
                    finally:
                        os._exit(0)


def _kill(pid: int, group_only: bool = False) -> None:
    """Kill the process group that a process leads, and the process itself, which may have left the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not group_only:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _have_own_folder(folder: str) -> None:
    """Make an empty folder, change into it, and use it for temporary files too."""
    os.mkdir(folder)
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _generators() -> list[Any]:
    """Return all random number generators of Python, numpy and torch that the preparation has made, wherever a module
    keeps them, and the libraries' default generators.
    """
    names = {"random": ["Random"], "numpy.random": ["BitGenerator", "RandomState"], "torch": ["Generator"]}
    imported = names.keys() & sys.modules.keys()
    kinds = tuple(getattr(sys.modules[module], kind) for module in imported for kind in names[module])
    generators = (each for each in gc.get_referents(*gc.get_objects()) if issubclass(type(each), kinds))
    return list({id(each): each for each in generators}.values())


def _draw_afresh(generator: Any) -> None:
    """Seed a generator anew, so that not every episode draws the same numbers."""
    with contextlib.suppress(Exception):
        if hasattr(generator, "random_raw"):  # numpy's, of which each kind is seeded when it is made
            generator.state = type(generator)().state
        else:
            generator.seed()
