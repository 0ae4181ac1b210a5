"""The tool server and the tool processes that it forks: where the functions of a user's module run.

The server imports the module once. Each tool process is a fork of it, plays one episode at a time and holds the
episode's instance, where the module has a class. Nothing that a function does there holds up another episode, or the
node, and a process that hangs or dies is replaced.

The owner asks the server, in messages of JSON over a socket:

    {"fork": true} and one end of a socket       {"pid": n}, or {"error": why}
    {"end": pid}                                 {"ended": how}; all that it started is ended too
    {"interrupt": pid}                           (no answer) the call that is being made there ends, as if late

and a tool process in lines of JSON over the socket that it was given: :class:`Calls`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from agent_environments import process_guard
from agent_environments.plain_values import plain_grade
from agent_environments.tools import deadline
from agent_environments.tools.function_tool import FunctionTool
from agent_environments.tools.module import ToolModule, load_module
from agent_environments.tools.tool import ToolError, WrongArguments

MAX_MESSAGE = 1 << 16
MAX_LINE = 64 << 20
"""Bytes of one answer of a tool process."""
TOO_LONG = b'{"raised": "its result is too long"}\n'


class Calls:
    """The calls that a tool process answers, with {"result": ...}, {"wrong": why}, {"raised": what, "place": where} or
    {"late": how}.

    Args:
        deadline_s: for making, resetting and closing an instance.
    """

    def __init__(self, module: ToolModule, deadline_s: float) -> None:
        self._module = module
        self._deadline_s = deadline_s
        self._instance: Any = None

    def answer(self, request: Mapping[str, Any]) -> bytes:
        """One line for one request, whose ``op`` is the name of one of the methods below."""
        arguments = {name: value for name, value in request.items() if name != "op"}
        try:
            answer = {"result": getattr(self, request["op"])(**arguments)}
        except WrongArguments as error:
            answer = {"wrong": str(error)}
        except (ToolError, deadline.Raised, ValueError) as error:
            answer = {"raised": str(error), "place": getattr(error, "place", "")}
        except deadline.DeadlinePassed as error:
            answer = {"late": str(error)}
        return json.dumps(answer).encode() + b"\n"

    def make(self) -> None:
        """Make the instance, where there is a class of it."""
        if self._module.instance_class is not None:
            self._instance = deadline.call(self._module.instance_class, {}, self._deadline_s)

    def reset(self, task_id: str) -> str:
        """Put the instance into the task's first state; what it has to show."""
        # A copy of its own: what it changes in there must not reach the reward, or another episode.
        task = copy.deepcopy(self._module.tasks[task_id])
        reset = functools.partial(self._instance.reset, task)  # whatever it calls its parameter
        shown = deadline.call(reset, {}, self._deadline_s)
        return "" if shown is None else str(shown)

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The result of a tool, as text; what nobody is shown of a long one is left out."""
        found = self._module.tools[tool]
        assert isinstance(found, FunctionTool), "the node asks others itself"
        text = found.run(arguments, self._instance)
        return text if found.terminal else text[: found.max_characters + 1]

    def reply(self, text: str) -> str | None:
        """Answer the text of a turn; None ends the episode."""
        assert self._module.reply is not None, "the node asks for one that is there"
        return self._module.reply.run(text, self._instance)

    def grade(self, task_id: str, answer: str, trajectory: list[dict[str, str]]) -> dict[str, Any]:
        """The fields of the episode's grade."""
        task = copy.deepcopy(self._module.tasks[task_id])
        grade = self._module.reward.grade(task, answer=answer, trajectory=trajectory, instance=self._instance)
        return asdict(plain_grade(grade))  # what no JSON can hold is refused here, as it is for every environment

    def close(self) -> None:
        """Close the instance, where it can be."""
        if hasattr(self._instance, "close"):
            deadline.call(self._instance.close, {}, self._deadline_s)


def serve(told: Mapping[str, Any], control: socket.socket) -> None:
    """Import the module that ``told`` names, and fork until the owner hangs up."""
    module = load_module(told["module"], told["tasks"])
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
                answer = _fork(module, told["deadline_s"], control, descriptors[0])
                children |= {answer["pid"]} if "pid" in answer else set()
            case {"end": int(pid)}:
                children.remove(pid)
                answer = {"ended": _end(pid)}
            case {"interrupt": int(pid)}:
                if pid in children:  # not reaped, so the number is nobody else's
                    os.kill(pid, signal.SIGALRM)
                continue
        control.send(json.dumps(answer).encode())


def _fork(module: ToolModule, deadline_s: float, control: socket.socket, descriptor: int) -> dict[str, Any]:
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no memory for another one
        os.close(descriptor)
        return {"error": str(error)}
    if pid == 0:
        control.close()
        _be_process(Calls(module, deadline_s), descriptor, server)
    os.close(descriptor)
    with contextlib.suppress(OSError):  # also done by the child: whoever comes first
        os.setpgid(pid, pid)
    return {"pid": pid}


def _be_process(calls: Calls, descriptor: int, server: int) -> NoReturn:
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        process_guard.set_process_control(process_guard.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before the line above
            os._exit(1)
        deadline.install()
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
            for line in requests:
                answer = calls.answer(json.loads(line))
                sys.stdout.flush()
                connection.sendall(answer if len(answer) < MAX_LINE else TOO_LONG)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _end(pid: int) -> str:
    """Kill a tool process, and what it started; says how it ended."""
    for group in (True, False):  # it may have left its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"signal {-code}" if code < 0 else f"status {code}"
