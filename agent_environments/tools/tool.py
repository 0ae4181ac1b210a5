"""The base of every tool, wherever it comes from: a name, a JSON schema, a check of its arguments, a call."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from loop_plumbing.fork_server import WrongArguments as WrongArguments  # an error of a call

if TYPE_CHECKING:
    from loop_plumbing.forked_process import ForkedProcess

MAX_CHARACTERS = 2048
"""Characters of a result, unless the tool says otherwise; AgentFly's figure."""
DEADLINE_S = 30.0
"""Seconds for a call, unless the tool says otherwise."""


class ToolError(Exception):
    """A tool was called and failed; the policy reads the message."""


class Tool(ABC):
    """A tool that the policy can call.

    Attributes:
        name: the name by which the policy calls the tool.
        description: the tool's documentation, which the policy reads.
        parameters: JSON schema of the arguments, ``{"type": "object", "properties", "required"}``.
        terminal: whether a successful call ends the episode; its result is then the episode's answer.
        stateful: whether the tool works on the episode's own instance.
        max_characters: the length at which a result is cut.
        deadline_s: seconds for a call.
        takes_code_folder: whether the tool reads and changes the files of the agent's code.
    """

    name: str
    description: str
    terminal: bool = False
    stateful: bool = False
    max_characters: int = MAX_CHARACTERS
    deadline_s: float = DEADLINE_S
    takes_code_folder: bool = False

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]: ...

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form of OpenAI's API, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def in_folder(self, session: CodeSession) -> Tool:
        """Return the tool for an episode whose agent's code runs in this session."""
        return self

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], process: ForkedProcess) -> str:
        """Call the tool and return its result as text; ``process`` is the episode's own process.

        Raises:
            WrongArguments: the tool does not take these arguments; nothing was called.
            ToolError: the tool failed.
            DeadlinePassed: the call took longer than :attr:`deadline_s`.
            ProcessEnded: the tool ended its process.
        """


class CodeSession(ABC):
    """A session in which the agent's code runs, called through ``tools``; it begins with files and leaves files."""

    tools: Sequence[Tool]

    @abstractmethod
    def give(self, files: Mapping[str, str]) -> None:
        """Put files into the session before it begins: name -> text."""

    @abstractmethod
    async def left_files(self) -> dict[str, bytes]:
        """Return the files that the session left, by name."""

    @abstractmethod
    async def change(self, files: Mapping[str, bytes | None]) -> None:
        """Write or remove (None) these files; raises ToolError if a file's place is taken, or there is no room."""

    @abstractmethod
    async def close(self) -> None:
        """End the session; may be called twice."""


def is_path_within(name: object) -> bool:
    """Return whether a value is the path of a file within a folder."""
    return isinstance(name, str) and bool(name) and not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


def packed(files: Mapping[str, bytes | None]) -> dict[str, str | None]:
    """Return files in a form that JSON can hold; None stands for a removed file."""
    return {name: None if content is None else base64.b64encode(content).decode() for name, content in files.items()}


def unpacked(files: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the files that :func:`packed` has packed."""
    return {name: None if text is None else base64.b64decode(text) for name, text in files.items()}


def as_text(result: object) -> str:
    """Return a tool's result as the policy reads it. Text stays as it is, None becomes "done", and other values become
    JSON; a value that JSON writes as a string (a date, a path, an enumeration's name) becomes this string, unquoted.

    Raises:
        ValueError: the result has no text form, such as an object without a text of its own.
    """
    if result is None:
        return "done"
    plain = _plain(result)
    if isinstance(plain, str):
        return plain
    text = to_json(plain, fallback=_own_text).decode()
    return str(json.loads(text)) if text.startswith('"') else text


def _plain(value: Any) -> Any:
    """Convert numpy's and torch's numbers and arrays, decimals and sets to Python's own values, also when nested."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, tuple) else _plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        items = [_plain(each) for each in value]
        try:
            return sorted(items)
        except TypeError:  # items of several kinds: in any order, but always the same
            return sorted(items, key=repr)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if hasattr(value, "dtype") and callable(listed := getattr(value, "tolist", None)):
        return _plain(listed())
    return value


def _own_text(value: object) -> str:
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        raise ValueError(f"{type(value).__name__} has no text of its own; return text, numbers, lists or mappings")
    return str(value)
