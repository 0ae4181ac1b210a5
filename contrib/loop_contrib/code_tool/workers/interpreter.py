"""The Python and the shell that an agent keeps from call to call.

Each runs the texts that it reads, and answers each with the word that came with it and JSON: the text of an error, or
an exit status (keeper.py).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import linecache
import os
import shlex
import signal
import sys
import traceback
import types
from typing import Any

from bounded_text import shortened

MAX_ERROR_CHARACTERS = 1 << 15
SHELL = "/bin/bash"
_DONE = 199
"""The descriptor by which the shell, and nothing that it runs, says that a command is over."""


def python(ask: int, done: int) -> None:
    """Run each requested code in one ``__main__`` module, until there are no more requests."""
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv[:], sys.path[:0], sys.dont_write_bytecode = [""], [""], True
    # Opened anew, as what was opened here before was not a pipe; by lines, so that it stands before later errors.
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1, closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    me = os.getpid()
    with os.fdopen(ask, "rb") as lines:
        for number, line in enumerate(lines, 1):
            word, text = json.loads(line)
            error = run(text, f"<call {number}>", vars(main))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if os.getpid() != me:  # of a process that the code has forked
                os.write(2, error.encode(errors="replace"))
                os._exit(bool(error))
            os.write(done, f"{word}{json.dumps(shortened(error, MAX_ERROR_CHARACTERS))}\n".encode())


def run(text: str, name: str, names: dict[str, Any]) -> str:
    """Run some code, and print the value of its last line if that is an expression. Return the traceback if the code
    raised an exception, else ""."""
    linecache.cache[name] = (len(text), None, f"{text}\n".splitlines(keepends=True), name)
    try:
        tree = ast.parse(text, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        return f"SystemExit: {error}\n"
    except BaseException as error:
        own = error.__traceback__
        try:
            return "".join(traceback.format_exception(type(error), error, own and own.tb_next))
        except BaseException:  # no memory is left for it
            return f"{type(error).__name__}\n"
    return ""


def shell(ask: int, done: int) -> None:
    """Replace this process with a shell."""
    os.dup2(ask, 0)
    os.dup2(done, _DONE)
    os.write(done, b"")
    os.execv(SHELL, [SHELL, "--noprofile", "--norc"])


def shell_line(word: str, text: str) -> bytes:
    """Return the shell line that runs ``text`` and reports its status. An interrupt ends the program, not the shell."""
    line = f"trap : INT; eval {shlex.quote(text)} </dev/null {_DONE}>&-\necho {word}$? >&{_DONE}\n"
    return line.encode(errors="replace")


KINDS = {"python": (python, lambda *asked: json.dumps(asked).encode() + b"\n"), "shell": (shell, shell_line)}
"""Kind -> the function that runs it, and the one that makes its input of a word and a text."""
