"""The tool ``python``: code of the agent in a sealed session of its own (workers/python_session.py).

The session is forked at the first call of an episode and keeps its variables. It cannot start a process or a thread,
call a network, or open a file but those of its interpreter and of its own folder. Where it hangs or ends, the next call
begins another one; the files in the folder stay. What it answers is text for the agent and nothing else, so a
session that lies deceives itself alone: rewards are computed elsewhere, from the files that it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from agent_environments.protocol import EnvironmentCrashed
from agent_environments.tools.environment import CodeSession
from agent_environments.tools.tool import DEADLINE_S, MAX_CHARACTERS, ToolError, WrongArguments
from loop_formats.schema import STRICT, from_mapping
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import ForkServer, ProcessEnded, scrubbed_environment

if TYPE_CHECKING:
    from loop_plumbing.forked_process import ForkedProcess

WORKER = Path(__file__).parent / "workers" / "python_session.py"
START_DEADLINE_S = 60.0
LOOK_S = 0.2
"""Between two looks at how much a session has written while it runs."""
MOST_FILES = 1000


@dataclass(frozen=True, config=STRICT)
class CodeLimits:
    """What a session may use. ``code: python`` takes these; as a mapping, ``code`` changes some.

    Attributes:
        deadline_s: for one call.
        memory_mb: beyond that of the interpreter as it starts.
        folder_mb: all files of a session together; one file may take half of it.
        max_characters: of what a call prints; the rest is cut.
        packages: imported before the first session; others cannot be, if they hold compiled code.
        python: the interpreter; by default the one below the node's own environment, so that nothing which is installed
            beside the node is in reach.
    """

    deadline_s: float = DEADLINE_S
    memory_mb: int = 256
    folder_mb: int = 16
    max_characters: int = MAX_CHARACTERS
    packages: Sequence[str] = ()
    python: str | None = None

    def __post_init__(self) -> None:
        if min(self.deadline_s, self.memory_mb, self.folder_mb, self.max_characters) <= 0:
            raise ValueError("deadline_s, memory_mb, folder_mb and max_characters must be above 0")


class PythonSessions:
    """The server of all sessions.

    Args:
        given: ``python``, or a mapping of :class:`CodeLimits`.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, given: object) -> None:
        if given == "python":
            given = {}
        if not isinstance(given, Mapping):
            raise ValueError(f"code is {given!r}: say `code: python`, or a mapping such as {{memory_mb: 512}}")
        self.limits = from_mapping(CodeLimits, given, "code")
        python = self.limits.python or getattr(sys, "_base_executable", None) or sys.executable
        told: dict[str, Any] = {"packages": list(self.limits.packages), "deadline_s": self.limits.deadline_s}
        told |= {"memory_mb": self.limits.memory_mb, "folder_mb": self.limits.folder_mb}
        told |= {"output_characters": self.limits.max_characters + 1}
        variables = scrubbed_environment(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        # -I: neither variables nor a user's own packages say what is imported.
        self._server = ForkServer("code", (python, "-I", str(WORKER)), told, EnvironmentCrashed, variables)
        self._numbers = itertools.count(1)
        self._folder = Path()

    async def open(self) -> None:
        """Start the server.

        Raises:
            ValueError: no session can be sealed here, or a package is missing; one line.
        """
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                ready = await self._server.start()
        except TimeoutError as error:
            raise ValueError(f"code: the server does not start within {START_DEADLINE_S:g} s") from error
        except EnvironmentCrashed as error:
            raise ValueError(f"code: {error}") from error
        self._folder = Path(ready["folder"])

    def check_files(self, task: Mapping[str, Any]) -> None:
        """Raise ValueError where a task's ``files`` are none that a session can be given."""
        files = task.get("files", {})
        if not isinstance(files, Mapping):
            raise ValueError("its field 'files' must map the names of files to their text: {'data.csv': '...'}")
        for name, text in files.items():
            path = PurePosixPath(str(name))
            if not isinstance(name, str) or path.is_absolute() or ".." in path.parts or str(path) in ("", "."):
                raise ValueError(f"its file {name!r} must be named by a path within the session's folder")
            if not isinstance(text, str):
                raise ValueError(f"its file {name!r} must be text, not {type(text).__name__}")
        if sum(len(text.encode()) for text in files.values()) > self.limits.folder_mb * 2**20:
            raise ValueError(f"its files take more than {self.limits.folder_mb} MiB: raise code.folder_mb")

    def session(self) -> PythonSession:
        """The session of an episode; nothing runs before its first call."""
        return PythonSession(self.limits, self._server, lambda: self._folder / str(next(self._numbers)))

    async def close(self) -> None:
        """End the server and all sessions."""
        await self._server.close()


class PythonSession(CodeSession):
    """The tool ``python`` of one episode.

    Args:
        limits: of the session.
        server: forks it.
        new_folder: the path of a folder that is nobody's yet.
    """

    name = "python"
    _parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python code; what it prints is shown."}},
        "required": ["code"],
    }

    def __init__(self, limits: CodeLimits, server: ForkServer, new_folder: Callable[[], Path]) -> None:
        self._limits = limits
        self._server = server
        self._new_folder = new_folder
        self._files: Mapping[str, str] = {}
        self._folder: Path | None = None
        self._process: ForkedProcess | None = None
        self.deadline_s = limits.deadline_s
        self.max_characters = limits.max_characters
        having = f" The packages {', '.join(limits.packages)} can be imported." if limits.packages else ""
        self.description = (
            "Run Python code and read what it prints; a last line that is an expression is printed too. Variables stay "
            f"from one call to the next, and files in the working folder.{having} There is no network and no other "
            f"program. A call may take {limits.deadline_s:g} s."
        )

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self._parameters)

    def give(self, files: Mapping[str, str]) -> None:
        """Have these in the folder when the session begins: name -> text."""
        self._files = files

    async def call(self, arguments: Mapping[str, Any], process: ForkedProcess) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) > 1:
            raise WrongArguments("it takes one argument, code, a text")
        session = await self._begun()
        try:
            answer = await self._watched(session, session.answer_within({"code": code}, self.deadline_s))
        except DeadlinePassed as error:
            raise ToolError(f"the code {error}; variables are gone, files are kept") from error
        except ProcessEnded as error:
            raise ToolError(f"{error}; variables are gone, files are kept") from error
        output = answer.get("output")
        if not isinstance(output, str):
            await session.end()
            raise ToolError("the session sent what is no answer, and was ended; variables are gone, files are kept")
        return output or "(nothing was printed)"

    async def _begun(self) -> ForkedProcess:
        if self._process is not None and self._process.alive:
            return self._process
        files: Mapping[str, str] = {}
        if self._folder is None:
            self._folder = self._new_folder()
            await asyncio.to_thread(self._folder.mkdir, mode=0o700)
            files = self._files
        process = self._process = await self._server.fork()
        try:
            began = await process.answer_within({"begin": str(self._folder), "files": dict(files)}, START_DEADLINE_S)
        except (DeadlinePassed, ProcessEnded) as error:  # no code of the agent has run in it
            raise EnvironmentCrashed(f"a session does not begin: {error}") from error
        if began != {"output": ""}:
            raise EnvironmentCrashed(f"a session does not begin: {json.dumps(began)[:200]}")
        return process

    async def _watched(self, session: ForkedProcess, asked: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Await an answer while nobody fills the disk.

        Raises:
            ToolError: the files are more than they may be; the session and they are gone.
        """
        assert self._folder is not None, "it is made before the session"
        call = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait([call], timeout=LOOK_S))[0]:
                await self._bound_files(session)
            await self._bound_files(session)
            answer: dict[str, Any] = await call
            return answer
        finally:
            if not call.done():
                call.cancel()
            with contextlib.suppress(asyncio.CancelledError, DeadlinePassed, ProcessEnded, EnvironmentCrashed):
                await call

    async def _bound_files(self, session: ForkedProcess) -> None:
        assert self._folder is not None, "it is made before the session"
        most = self._limits.folder_mb * 2**20
        if not await asyncio.to_thread(_holds_more, self._folder, most):
            return
        await session.end()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._folder = None
        raise ToolError(
            f"its files are more than {MOST_FILES}, or take more than {self._limits.folder_mb} MiB; variables and "
            "files are gone, and the next call begins as the first did"
        )

    async def left_files(self) -> dict[str, bytes]:
        """The files in its folder, by their paths in it.

        Where it never began they are those that it was given. Where they are more than they may be there are none.
        """
        if self._folder is None:
            return {name: text.encode() for name, text in self._files.items()}
        if self._process is not None and self._process.alive:
            await self._process.end()  # so that nothing moves while they are read
        if await asyncio.to_thread(_holds_more, self._folder, self._limits.folder_mb * 2**20):
            return {}
        return await asyncio.to_thread(_contents, self._folder)

    async def close(self) -> None:
        """End the session and remove its folder; may be called twice."""
        if self._process is not None:
            self._process.kill()
            await asyncio.wait([self._process.ended], timeout=START_DEADLINE_S)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _holds_more(folder: Path, most: int) -> bool:
    """Whether the files of a session are more bytes, or they and its folders more in number, than they may be."""
    size, waiting, seen = 0, [folder], 0
    while waiting:
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                seen += 1
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    else:
                        size += entry.stat(follow_symlinks=False).st_size
                if size > most or seen > MOST_FILES:
                    return True
    return False


def _contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)).encode("utf-8", "replace").decode(): path.read_bytes() for path in files}
