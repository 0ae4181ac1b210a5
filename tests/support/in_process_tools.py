"""A file's functions called in the test's own process, in place of one forked for each episode: a hundred times faster.

Nothing is isolated. What is imported is imported twice, as with a fork server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent_environments.tools.forked import ToolCalls
from agent_environments.tools.identity import tasks_digest
from agent_environments.tools.module import load_module
from agent_environments.tools.tool import WrongArguments
from loop_plumbing import deadline
from loop_plumbing.breakage import Raised


class InProcessServer:
    """In place of :class:`~loop_plumbing.forked_process.ForkServer`."""

    def __init__(self, name: str, command: object, told: Mapping[str, Any], *where: object) -> None:
        self._told = told
        self._module: Any = None

    async def fork(self) -> InProcess:
        if self._module is None:
            self._module = load_module(self._told["module"], self._told["tasks"])
            deadline.install()
        return InProcess(ToolCalls(self._module, self._told["deadline_s"]), self._module)

    async def close(self) -> None: ...


class InProcess:
    """In place of :class:`~loop_plumbing.forked_process.ForkedProcess`."""

    alive = True

    def __init__(self, calls: ToolCalls, module: Any) -> None:
        self._calls = calls
        kind = module.instance_class
        digest = tasks_digest(module.tasks.all())
        self.ready = {"tasks": digest, "makes": kind is not None, "closes": hasattr(kind, "close")}

    async def ask(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        request = json.loads(json.dumps({"op": op, **arguments}))
        answer = json.loads(json.dumps(self._calls.answer(request)))
        if "wrong" in answer:
            raise WrongArguments(answer["wrong"])
        if "late" in answer:
            raise deadline.DeadlinePassed(answer["late"])
        if "raised" in answer:
            raise Raised(answer["raised"], answer["place"])
        return answer["result"]

    async def idle(self) -> None: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...
