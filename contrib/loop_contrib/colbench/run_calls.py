"""Runs the calls of answers, each in a sealed process of its own (:mod:`loop_plumbing.fork_server`).

    python -I run_calls.py SOCKET

Runs by path under the answers' interpreter. The first line of standard input is a JSON object with ``memory_mb``,
``cpu_s``, the processor time of a call, and ``packages``, which all processes inherit. It is ready with ``level``, the
strongest level of the sandbox that holds here.

A process first gets the modules that the reference imports, as most could not be loaded any more by a process that is
sealed. It seals itself, and answers ``{"sealed": true}``, or says why not: ``{"failed": ...}``. Only then does it get
``{"code": ..., "call": ...}``, so code that runs for one call can learn nothing of the others. It answers
``{"value": ...}`` in the form of :func:`portable`, or ``{"raised": name}``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Behind the packages of this interpreter; and files that import each other by name.
sys.path.append(
    next(str(above) for above in Path(__file__).resolve().parents if (above / "agent_environments").is_dir())
)
sys.path.insert(0, f"{sys.path[-1]}/agent_environments/sandbox")

import opened_files
import sandbox

from loop_plumbing import fork_server

del sys.path[0], sys.path[-1]  # answers have no use for them


class CallTooLong(BaseException):
    """A call took too long. ``except Exception`` in the called code does not catch this error."""


def portable(value: Any) -> Any:
    """Return ``value`` as JSON. Values that are equal in Python give equal JSON; so does NaN."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # numpy's, which equals Python's own
    if value is None or isinstance(value, str):
        return value if value is None else ["text", str(value)]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if value.is_integer():
            return int(value)
        return float(value) if abs(value) < float("inf") else ["float", repr(float(value))]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [portable(item) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted((portable(item) for item in value), key=repr)]
    if isinstance(value, dict):
        return ["dict", sorted(([portable(key), portable(item)] for key, item in value.items()), key=repr)]
    return [type(value).__qualname__, repr(value)]


def outcome(code: str, call: str, cpu_s: float) -> str:
    """Return the JSON line that reports the outcome of one call."""
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            names: dict[str, Any] = {"__name__": "answer"}
            exec(code, names)
            line = json.dumps({"value": portable(eval(call, names))})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except BaseException as error:
        line = json.dumps({"raised": type(error).__name__})
    return line


def _too_long(number: int, frame: Any) -> None:
    raise CallTooLong


def load(packages: Sequence[str]) -> None:
    """Import the packages that are installed. Raises RuntimeError if one starts a thread, which would not be sealed."""
    for package in packages:
        with contextlib.suppress(Exception):  # it is not installed: the call that needs it fails
            importlib.import_module(package)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {', '.join(packages)} starts a thread")


def seal(level: str, settings: Mapping[str, Any]) -> None:
    """Seal this process."""
    most_s = math.ceil(settings["cpu_s"]) + 1  # for code that will not be stopped by the timer
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    signal.signal(signal.SIGPROF, _too_long)
    sandbox.confine({"level": level, "memory_mb": settings["memory_mb"]})


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    level = sandbox.probe()

    def play(connection: socket.socket) -> None:
        sandbox.silence((0, 1, 2))
        with os.fdopen(connection.detach(), "rb") as requests:
            sandbox.close_descriptors_except({0, 1, 2, requests.fileno()})
            try:
                load(json.loads(requests.readline())["packages"])
            except RuntimeError as error:
                return write(requests.fileno(), json.dumps({"failed": str(error)}))
            seal(level, settings)
            write(requests.fileno(), json.dumps({"sealed": True}))
            asked = json.loads(requests.readline())
            write(requests.fileno(), outcome(asked["code"], asked["call"], settings["cpu_s"]))

    def write(descriptor: int, line: str) -> None:
        rest = memoryview(line.encode() + b"\n")
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def prepare() -> fork_server.Prepared:
        load(settings["packages"])
        opened_files.install()
        return fork_server.Prepared(play, {"level": level})

    fork_server.serve(socket.socket(fileno=int(sys.argv[1])), prepare)
    os._exit(0)


if __name__ == "__main__":
    main()
