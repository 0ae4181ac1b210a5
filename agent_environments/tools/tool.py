"""The base of every tool, wherever it comes from: a name, a JSON schema, a check of its arguments, a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from loop_plumbing.fork_server import WrongArguments as WrongArguments  # part of what a call raises

if TYPE_CHECKING:
    from loop_plumbing.forked_process import ForkedProcess

MAX_CHARACTERS = 2048
"""Of a result, unless the tool says otherwise; AgentFly's figure."""
DEADLINE_S = 30.0
"""For a call, unless the tool says otherwise."""


class ToolError(Exception):
    """The tool was called and failed; the message is for the policy."""


class Tool(ABC):
    """A tool that the policy can call.

    Attributes:
        name: what the policy calls it by.
        description: what the policy is told of it.
        parameters: JSON schema of its arguments, ``{"type": "object", "properties", "required"}``.
        terminal: a call that succeeds ends the episode, and its result is the episode's answer.
        stateful: it works on the episode's own instance.
        max_characters: of its result; what is longer is cut.
        deadline_s: for one call.
    """

    name: str
    description: str
    terminal: bool = False
    stateful: bool = False
    max_characters: int = MAX_CHARACTERS
    deadline_s: float = DEADLINE_S

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]: ...

    @property
    def schema(self) -> dict[str, Any]:
        """In the form of OpenAI's API, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], process: ForkedProcess) -> str:
        """The result of a call, as text; ``process`` is the episode's own.

        Raises:
            WrongArguments: it does not take these; nothing was called.
            ToolError: it failed.
            DeadlinePassed: it took longer than :attr:`deadline_s`.
            ProcessEnded: it ended its process.
        """


def as_text(result: object) -> str:
    """A tool's result as the policy reads it: text as it is, anything else as JSON, None as "done"."""
    if isinstance(result, str):
        return result
    return "done" if result is None else to_json(result, fallback=str).decode()
