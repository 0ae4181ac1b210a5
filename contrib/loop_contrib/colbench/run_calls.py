"""Runs an answer's calls in the sandbox; a program, run by path, that imports nothing of the project but the sandbox.

    python -I run_calls.py probe                      prints the strongest level that holds here
    python -I run_calls.py LEVEL MEMORY_MB CPU_S CALLS PACKAGE...
                                                      prints "ready" when sealed, then takes {"code", "calls",
                                                      "longest"} on standard input

The packages are those that the reference imports: most could not be loaded any more by a process that is sealed.

Every call has a process of its own, forked and sealed before there is a request, so that code which runs for one call
can learn nothing of the others. One JSON line per call: ``{"value": ...}`` in the form of :func:`portable`, or
``{"raised": name}``; ``{}`` where its process ended without a line, or with one of more than "longest" bytes. A call
may use CPU_S seconds of processor time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(
    0,
    next(
        str(above / "agent_environments/sandbox")
        for above in Path(__file__).parents
        if (above / "agent_environments").is_dir()
    ),
)

import opened_files
import sandbox

READY = b"ready\n"


class CallTooLong(BaseException):
    """Out of reach of ``except Exception``."""


def portable(value: Any) -> Any:
    """Return ``value`` as JSON. Two values have the same form if Python calls them equal, and NaN equals itself."""
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
    """Return the line for one call."""
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


class SealedProcess(NamedTuple):
    """A sealed process that waits for its call, and our ends of its pipes."""

    pid: int
    asking: int
    answering: int


def sealed(level: str, memory_mb: int, cpu_s: float) -> SealedProcess:
    """Fork one; it has no other descriptor than its own ends. Raises OSError if it could not be sealed."""
    asked, asking = os.pipe()
    answering, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _be_sealed(asked, answer, level, memory_mb, cpu_s)
        finally:
            os._exit(0)
    os.close(asked)
    os.close(answer)
    if not _line(answering, len(READY)):
        raise OSError("a process could not be sealed")
    return SealedProcess(pid, asking, answering)


def _be_sealed(asked: int, answer: int, level: str, memory_mb: int, cpu_s: float) -> None:
    sandbox.die_with_parent()
    sandbox.close_descriptors_except({0, 1, 2, asked, answer})
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    most_s = math.ceil(cpu_s) + 1  # for code that will not be stopped by the timer
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    signal.signal(signal.SIGPROF, _too_long)
    sandbox.confine({"level": level, "memory_mb": memory_mb})
    _write(answer, READY)
    with os.fdopen(asked, "rb") as file:
        request = json.load(file)
    _write(answer, outcome(request["code"], request["call"], cpu_s).encode() + b"\n")


def asked_of(waiting: SealedProcess, code: str, call: str, longest: int) -> bytes:
    """Return the line of one call; its process is gone then."""
    try:
        _write(waiting.asking, json.dumps({"code": code, "call": call}).encode())
        os.close(waiting.asking)
        line = _line(waiting.answering, longest)
    except BrokenPipeError:
        line = b""
    os.kill(waiting.pid, signal.SIGKILL)
    os.waitpid(waiting.pid, 0)
    os.close(waiting.answering)
    return line or b"{}\n"


def _line(descriptor: int, longest: int) -> bytes:
    """Read a line; b"" if it has more than ``longest`` bytes, or no end."""
    line = b""
    while len(line) <= longest and (chunk := os.read(descriptor, 1 << 16)):
        line += chunk
        if b"\n" in chunk:
            line = line[: line.index(b"\n") + 1]
            return line if len(line) <= longest else b""
    return b""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    if sys.argv[1] == "probe":
        print(sandbox.probe())
        return
    level, memory_mb, cpu_s, calls, packages = sys.argv[1], *map(float, sys.argv[2:5]), sys.argv[5:]
    sandbox.die_with_parent()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for printed in (1, 2):
        os.dup2(null, printed)
    sandbox.close_descriptors_except({0, 1, 2, answers})
    for package in packages:
        with contextlib.suppress(Exception):  # it is not installed: the call that needs it fails
            importlib.import_module(package)
    if len(os.listdir("/proc/self/task")) > 1:  # only the thread that asks for it is sealed
        os.write(answers, f"one of {', '.join(packages)} starts a thread\n".encode())
        sys.exit(1)
    opened_files.install()
    processes = [sealed(level, int(memory_mb), cpu_s) for _ in range(int(calls))]
    _write(answers, READY)
    request = json.loads(sys.stdin.buffer.read())
    for waiting, call in zip(processes, request["calls"], strict=True):
        _write(answers, asked_of(waiting, request["code"], call, request["longest"]))


if __name__ == "__main__":
    main()
