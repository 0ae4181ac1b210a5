"""The tools ``python`` and ``shell``: an agent's programs in a box or, if no box can be made, in a sealed interpreter
(agent_environments/sandbox).

The box is made at the first call of an episode. Python keeps its variables, the shell its folder and variables, and
both share the files. If a program there hangs or ends, the next call begins another one; the files stay. The agent gets
text as the answer and nothing else: rewards are computed elsewhere, from the remaining files.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from agent_environments.protocol import EnvironmentCrashed
from agent_environments.tools.tool import (
    DEADLINE_S,
    MAX_CHARACTERS,
    CodeSession,
    Tool,
    ToolError,
    WrongArguments,
    is_path_within,
    packed,
)
from loop_formats.schema import STRICT, from_mapping
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import ForkServer, ProcessEnded, scrubbed_environment

if TYPE_CHECKING:
    from loop_plumbing.forked_process import ForkedProcess

WORKER = Path(__file__).parent / "workers" / "code_server.py"
START_DEADLINE_S = 60.0
MAX_TASK_FILES = 500
"""Number of a task's own files, of the thousand that a box may hold."""
_PAGE = 4096
"""Bytes of a page; the last one of a file may be nearly empty."""
SLACK_S = 60.0
"""Seconds for a call beyond its deadline, at which the box itself ends the program."""
_ALL = "Run {}, and read what it prints{}. {} stay from one call to the next, and files in the working folder."
_KINDS = {
    "python": ("code", "Python code", "; a last line that is an expression is printed too", "Variables"),
    "shell": ("command", "commands of bash", ", and an exit status that is not 0", "Its folder and its variables"),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, config=STRICT)
class CodeLimits:
    """The tools and limits of a box, the sandbox of an agent's code. ``code: python`` and ``code: shell`` take the
    defaults; a mapping as ``code`` changes some.

    Attributes:
        tools: ``python``, ``shell`` or both, which then share one box.
        deadline_s: longest time of one call.
        memory_mb: memory of all processes together, beyond that of an empty interpreter.
        folder_mb: size of all files together.
        max_characters: length of a call's output; the middle of a longer output is dropped.
        packages: packages that the code can import, with all that they require; it can import no others.
        cgroup: the folder of a cgroup that you own. Each box gets a cgroup below it that bounds its memory. Without
            ``cgroup``, the memory of a box's processes is measured every 50 ms.
        python: the interpreter; by default the one that the node's virtual environment was made from.
    """

    tools: Sequence[str] = ("python",)
    deadline_s: float = DEADLINE_S
    memory_mb: int = 256
    folder_mb: int = 16
    max_characters: int = MAX_CHARACTERS
    packages: Sequence[str] = ()
    cgroup: str | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        if min(self.deadline_s, self.memory_mb, self.folder_mb, self.max_characters) <= 0:
            raise ValueError("deadline_s, memory_mb, folder_mb and max_characters must be above 0")
        if not self.tools or not set(self.tools) <= _KINDS.keys():
            raise ValueError(f"tools must be of {', '.join(_KINDS)}, not {list(self.tools)}")


class PythonSessions:
    """The server of all boxes.

    Args:
        options: ``python``, ``shell``, or a mapping of :class:`CodeLimits`.

    Raises:
        ValueError: ``options`` is neither a tool's name nor such a mapping.
    """

    def __init__(self, options: object) -> None:
        if isinstance(options, str) and options in _KINDS:
            options = {"tools": [options]}
        if not isinstance(options, Mapping):
            raise ValueError(
                f"code is {options!r}: say `code: python`, `code: shell`, or a mapping such as {{memory_mb: 512}}"
            )
        self.limits = limits = from_mapping(CodeLimits, options, "code")
        config = {
            name: getattr(limits, name) for name in ("deadline_s", "memory_mb", "folder_mb", "max_characters", "cgroup")
        }
        config |= {"packages": list(limits.packages), "tools": list(limits.tools), "hidden": _own_folders()}
        python = limits.python or getattr(sys, "_base_executable", None) or sys.executable
        # -I: neither variables nor a user's own packages say what is imported.
        command = (python, "-I", str(WORKER))
        variables = scrubbed_environment(OPENBLAS_NUM_THREADS="1", PATH=os.environ.get("PATH", os.defpath))
        variables |= {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
        self._server = ForkServer("code", command, config, EnvironmentCrashed, variables)

    async def open(self) -> None:
        """Start the server.

        Raises:
            ValueError: this machine allows neither a box nor a sealed interpreter, or a package is missing; one line.
        """
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                ready = await self._server.start()
        except TimeoutError as error:
            raise ValueError(f"code: the server does not start within {START_DEADLINE_S:g} s") from error
        except EnvironmentCrashed as error:
            raise ValueError(f"code: {error}") from error
        if ready["sealed"]:
            logger.warning(
                "code: %s: agents get a sealed Python in place of a box, in which much fails that asks about files",
                ready["sealed"],
            )

    def check_files(self, task: Mapping[str, Any]) -> None:
        """Check a task's ``files``. Raises ValueError if a box cannot hold one of them."""
        files = task.get("files", {})
        if not isinstance(files, Mapping):
            raise ValueError("its field 'files' must map the names of files to their text: {'data.csv': '...'}")
        for name, text in files.items():
            if not is_path_within(name):
                raise ValueError(f"its file {name!r} must be named by a path within the session's folder")
            if not isinstance(text, str):
                raise ValueError(f"its file {name!r} must be text, not {type(text).__name__}")
        if sum(len(text.encode()) + _PAGE for text in files.values()) > self.limits.folder_mb * 2**20:
            raise ValueError(f"its files take more than {self.limits.folder_mb} MiB: raise code.folder_mb")
        if len(files) > MAX_TASK_FILES:
            raise ValueError(f"its files are more than {MAX_TASK_FILES}")

    def session(self) -> BoxSession:
        """Return the box of an episode. Its first process starts at the first call."""
        return BoxSession(self.limits, self._server)

    async def close(self) -> None:
        """End the server and all boxes."""
        await self._server.close()


def _own_folders() -> list[str]:
    """Return the folders that this process imports from or works in, without the standard library."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")}
    return [path for path in map(os.path.abspath, [*sys.path, "."]) if path not in standard]


class BoxSession(CodeSession):
    """The box of one episode, or the sealed interpreter in its place.

    Args:
        limits: the limits of the box.
        server: the server that forks the box.
    """

    def __init__(self, limits: CodeLimits, server: ForkServer) -> None:
        self._limits = limits
        self._server = server
        self._files: Mapping[str, bytes] = {}
        self._process: ForkedProcess | None = None
        self.tools = [CodeTool(kind, self, limits) for kind in limits.tools]

    def give(self, files: Mapping[str, str]) -> None:
        self._files = {name: text.encode() for name, text in files.items()}

    async def run(self, kind: str, text: str) -> str:
        """Run ``text`` with the tool ``kind`` and return what it prints. Raises ToolError if the box has ended."""
        answer = await self._ask({"run": kind, "text": text}, self._limits.deadline_s + SLACK_S)
        if answer["over"] and self._process is not None:
            await self._process.end()  # and its folder with it
        if answer["gone"]:
            raise ToolError("\n".join(filter(None, [answer["gone"], answer["output"]])))
        return str(answer["output"]) or "(nothing was printed)"

    async def _ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        if self._process is None or not self._process.alive:
            process = self._process = await self._server.fork()
            try:
                begun = await process.answer_within({"files": packed(self._files)}, START_DEADLINE_S)
            except (DeadlinePassed, ProcessEnded) as error:  # nothing of the agent has run in it
                raise EnvironmentCrashed(f"a box does not begin: {error}") from error
            if begun["refused"]:
                raise EnvironmentCrashed(f"a box does not begin with {begun['refused']}")
        try:
            return await self._process.answer_within(request, deadline_s)
        except (DeadlinePassed, ProcessEnded) as error:
            raise ToolError(f"{error}; variables and files are gone") from error

    async def left_files(self) -> dict[str, bytes]:
        """Return the contents of the files in the box's folder, by path relative to the folder. Before the box starts
        these are the task's files; after its end there are none."""
        if self._process is None:
            return dict(self._files)
        left: dict[str, bytes] = {}
        with contextlib.suppress(ToolError):
            number = 0
            while self._process.alive and (piece := await self._ask({"piece": number}, START_DEADLINE_S)):
                left[piece["name"]] = left.get(piece["name"], b"") + base64.b64decode(piece["content"])
                number += 1
        return left

    async def change(self, files: Mapping[str, bytes | None]) -> None:
        if files and (refused := (await self._ask({"files": packed(files)}, START_DEADLINE_S))["refused"]):
            raise ToolError(f"the working folder does not take {refused}")

    async def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.wait([self._process.ended], timeout=START_DEADLINE_S)


class CodeTool(Tool):
    """A tool of a box: ``python`` or ``shell``."""

    def __init__(self, kind: str, box: BoxSession, limits: CodeLimits) -> None:
        self.name = kind
        self._box = box
        self._argument, what, more, lasting = _KINDS[kind]
        self._about = f"{what[0].upper()}{what[1:]}; what it prints is shown."
        self.deadline_s = limits.deadline_s
        self.max_characters = 2 * limits.max_characters + 500  # it is cut in the box, in its middle
        having = f" The packages {', '.join(limits.packages)} can be imported." if limits.packages else ""
        self.description = (
            f"{_ALL.format(what, more, lasting)}{having} There is no network. A call may take {limits.deadline_s:g} s."
        )

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {self._argument: {"type": "string", "description": self._about}},
            "required": [self._argument],
        }

    async def call(self, arguments: Mapping[str, Any], process: ForkedProcess) -> str:
        text = arguments.get(self._argument)
        if not isinstance(text, str) or len(arguments) > 1:
            raise WrongArguments(f"it takes one argument, {self._argument}, a text")
        return await self._box.run(self.name, text)
