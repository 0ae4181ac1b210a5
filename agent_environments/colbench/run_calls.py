"""Runs an answer's calls in the sandbox; a program, run by path, that imports nothing of the project but the sandbox.

    python -I run_calls.py probe                      prints the strongest level that holds here
    python -I run_calls.py LEVEL MEMORY_MB CPU_S PACKAGE...
                                                      prints "ready" when sealed, then takes {"code", "calls"} on
                                                      standard input

The packages are those that the reference imports: most could not be loaded any more by a process that is sealed.

One JSON line per call: ``{"value": ...}`` in the form of :func:`portable`, or ``{"raised": name}``. Every call runs the
code anew, in names of its own, and may use CPU_S seconds of processor time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from typing import Any

sys.path.insert(0, os.path.abspath(os.path.join(__file__, "../../sandbox")))

import opened_files
import sandbox


class CallTooLong(BaseException):
    """Out of reach of ``except Exception``."""


def portable(value: Any) -> Any:
    """``value`` as JSON. Two values have the same form if Python calls them equal, and NaN equals itself."""
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
    """The line for one call."""
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


def main() -> None:
    if sys.argv[1] == "probe":
        print(sandbox.probe())
        return
    level, memory_mb, cpu_s, packages = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    sandbox.die_with_parent()
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for printed in (1, 2):
        os.dup2(null, printed)
    sandbox.close_descriptors_except({0, 1, 2, answers})
    for package in packages:
        with contextlib.suppress(Exception):  # it is not installed: the call that needs it says so
            importlib.import_module(package)
    if len(os.listdir("/proc/self/task")) > 1:  # only the thread that asks for it is sealed
        os.write(answers, f"one of {', '.join(packages)} starts a thread\n".encode())
        sys.exit(1)
    opened_files.install()
    signal.signal(signal.SIGPROF, _too_long)
    sandbox.confine({"level": level, "memory_mb": memory_mb})
    os.write(answers, b"ready\n")
    request = json.loads(sys.stdin.buffer.read())
    for call in request["calls"]:
        line = outcome(request["code"], call, cpu_s).encode() + b"\n"
        while line:
            line = line[os.write(answers, line) :]
    os._exit(0)


if __name__ == "__main__":
    main()
