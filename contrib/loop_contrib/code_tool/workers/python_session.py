"""Forks the sessions in which agents run Python code, and is what runs in one.

    python python_session.py SOCKET

Runs under any interpreter. The first line of standard input is a JSON object:

    packages        imported before the first session; libraries cannot be loaded later
    memory_mb, folder_mb, deadline_s, output_characters      limits of a session

A session is sealed (agent_environments/sandbox) before it runs the first line of code. It keeps its variables from
one call to the next, and nothing in it is worth taking. It answers in lines of JSON:

    {"begin": folder, "files": {name: text}}      {"output": ""}
    {"code": text}                                {"output": text}
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import linecache
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Our own packages, behind those of this interpreter; and the sandbox, whose files import each other by name.
sys.path.append(
    next(str(above) for above in Path(__file__).resolve().parents if (above / "agent_environments").is_dir())
)
sys.path.insert(0, f"{sys.path[-1]}/agent_environments/sandbox")

import opened_files
import sandbox
from bounded_text import BoundedText

from loop_plumbing import deadline, fork_server

del sys.path[0], sys.path[-1]  # code of agents has no use for them


class InterpreterSession:
    """Answers the requests of one episode."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self._limits = limits
        self._names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        self._calls = 0

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        if "begin" in request:
            self._begin(request["begin"], request["files"])
            return {"output": ""}
        return {"output": self.run(request["code"])}

    def _begin(self, folder: str, files: Mapping[str, str]) -> None:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder, PYTHONHASHSEED="0")
        tempfile.tempdir = folder
        for name in ("chmod", "utime"):  # a call that the sandbox refuses, and shutil.copy makes
            setattr(os, name, lambda *_, **__: None)
        os.listxattr = lambda *_, **__: []
        limits = {"memory_mb": self._limits["memory_mb"], "file_bytes": self._limits["folder_mb"] * 2**19}
        sandbox.confine({"level": "seccomp", "folder": folder, **limits})
        for name, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            with open(name, "w", encoding="utf-8", newline="") as file:
                file.write(text)

    def run(self, code: str) -> str:
        """Run some code; returns what it printed, the value of its last line if that is an expression, and the
        traceback of what it raised."""
        self._calls += 1
        name = f"<call {self._calls}>"
        linecache.cache[name] = (len(code), None, f"{code}\n".splitlines(keepends=True), name)
        printed = BoundedText(self._limits["output_characters"])
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                deadline.call(self._execute, {"code": code, "name": name}, self._limits["deadline_s"])
            except deadline.DeadlinePassed as error:
                printed.write(f"TimeoutError: the code {error}\n")
            except deadline.Raised as error:
                printed.write(_traceback(error.__cause__ or error))
        return printed.getvalue()

    def _execute(self, code: str, name: str) -> None:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
            if value is not None:
                print(repr(value))


def _traceback(error: BaseException) -> str:
    """A traceback without the lines that are ours."""
    if isinstance(error, SystemExit):
        return f"SystemExit: {error}\n"
    shown = traceback.TracebackException.from_exception(error, capture_locals=False)
    for each in _chain(shown):
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if frame.filename[0] == "<"])
    return "".join(shown.format())


def _chain(shown: traceback.TracebackException | None) -> list[traceback.TracebackException]:
    found: list[traceback.TracebackException] = []
    waiting = [shown]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in found:
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found


def prepare(limits: Mapping[str, Any], folder: str) -> fork_server.Prepared:
    """Import what sessions may import, and make sure that they can be sealed."""
    for name in limits["packages"]:
        importlib.import_module(name)
    opened_files.install()
    deadline.install()
    if sandbox.landlock_abi() < sandbox.WRITING_ABI:
        raise OSError(sandbox.WRITING_MISSING)
    if sandbox.probe() != "seccomp":
        raise OSError("the kernel, or the container, refuses seccomp filters, without which no code of agents is run")
    sandbox.undumpable()

    def play(connection: socket.socket) -> None:
        sandbox.silence((0, 1, 2))
        sandbox.close_descriptors_except({0, 1, 2, connection.fileno()})
        fork_server.answers(lambda: InterpreterSession(limits).answer)(connection)

    return fork_server.Prepared(play, {"folder": folder})


def main() -> None:
    limits = json.loads(sys.stdin.readline())
    folder = tempfile.mkdtemp(prefix="code-")
    try:
        fork_server.serve(socket.socket(fileno=int(sys.argv[1])), lambda: prepare(limits, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
