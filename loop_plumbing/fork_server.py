"""A server that prepares once and forks a process for each episode: its own end, and that of the processes.

Nothing that happens in a process holds up another episode, or the owner, and a process that hangs or dies is replaced.
It runs below the owner (:mod:`agent_environments.forked_process`), perhaps under another interpreter, so it needs the
standard library only. The owner asks it, in messages of JSON over a socket:

    {"fork": true} and one end of a socket       {"pid": n}, or {"error": why}
    {"end": pid}                                 {"ended": how}; all that it started is ended too
    {"interrupt": pid}                           (no answer) the process gets SIGALRM

and a process in lines of JSON over the socket that it was given.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from loop_plumbing import process_guard
from loop_plumbing.breakage import told

MAX_MESSAGE = 1 << 16
MAX_LINE = 64 << 20
"""Bytes of one answer of a process."""
TOO_LONG = b'{"raised": "its result is too long"}\n'


class DeadlinePassed(Exception):
    """The call was not over in time."""


class WrongArguments(Exception):
    """The arguments are none that the function takes; the message says which, and why."""


Answering = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers one request with {"result": ...}, or for an exception {"wrong": why}, {"late": how} or {"raised": what,
"place": where}."""


def serve(control: socket.socket, prepare: Callable[[], Callable[[], Answering]]) -> None:
    """Prepare, and fork until the owner hangs up.

    Args:
        prepare: its result makes, in each process, what answers there. The owner is told why it raises.
    """
    try:
        make = prepare()
    except (Exception, SystemExit) as error:
        control.send(json.dumps({"failed": told(error)}).encode())
        return
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    control.send(json.dumps({"ready": os.getpid()}).encode())
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
        if not message:
            return
        match json.loads(message):
            case {"fork": _}:
                answer = _fork(make, control, descriptors[0])
                children |= {answer["pid"]} if "pid" in answer else set()
            case {"end": int(pid)}:
                children.remove(pid)
                answer = {"ended": _end(pid)}
            case {"interrupt": int(pid)}:
                if pid in children:  # not reaped, so the number is nobody else's
                    os.kill(pid, signal.SIGALRM)
                continue
        control.send(json.dumps(answer).encode())


def _fork(make: Callable[[], Answering], control: socket.socket, descriptor: int) -> dict[str, Any]:
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no memory for another one
        os.close(descriptor)
        return {"error": str(error)}
    if pid == 0:
        control.close()
        _be_process(make, descriptor, server)
    os.close(descriptor)
    with contextlib.suppress(OSError):  # also done by the child: whoever comes first
        os.setpgid(pid, pid)
    return {"pid": pid}


def _be_process(make: Callable[[], Answering], descriptor: int, server: int) -> NoReturn:
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        process_guard.set_process_control(process_guard.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before the line above
            os._exit(1)
        answering = make()
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
            for line in requests:
                answer = json.dumps(answering(json.loads(line))).encode() + b"\n"
                sys.stdout.flush()
                connection.sendall(answer if len(answer) < MAX_LINE else TOO_LONG)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _end(pid: int) -> str:
    """Kill a process, and what it started; says how it ended."""
    for group in (True, False):  # it may have left its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"signal {-code}" if code < 0 else f"status {code}"
