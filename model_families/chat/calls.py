"""Tool calls between the form that a model writes them in and the one that environments read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from agent_environments.tool_calls import CALL_CLOSES, CALL_OPENS, ToolCall, render_tool_call
from loop_plumbing.visible import printable

CALLED = ToolCall("qwname", {"qwkey": "qwvalue"})
OFFERED = {
    "type": "function",
    "function": {
        "name": CALLED.name,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"qwkey": {"type": "string", "description": "A value."}}},
    },
}
"""A call of a tool that no task has, and what it is offered as: by them the form of a template is learned."""


@dataclass(frozen=True)
class CallForm:
    """How a template writes calls that are JSON objects: what stands before, between and behind them."""

    opens: str
    between: str
    closes: str
    name: str
    arguments: str

    def read(self, text: str) -> tuple[str, list[tuple[object, object]]]:
        """What is said before the calls, and (name, arguments) of each.

        Raises:
            ValueError, KeyError, RecursionError: there are calls, and not in this form.
        """
        mark = self.opens.strip()
        said, opened, rest = text.partition(mark) if mark else ("", text.lstrip()[:1] == "{" and "{", text)
        calls: list[tuple[object, object]] = []
        while opened:
            written, end = json.JSONDecoder().raw_decode(rest := rest.lstrip())
            if not isinstance(written, dict):
                raise ValueError("a call is an object")
            arguments = written[self.arguments]
            calls.append((written[self.name], json.loads(arguments) if isinstance(arguments, str) else arguments))
            rest = rest[end:].lstrip()
            opened = self.between.strip() if rest.startswith(self.between.strip()) and rest else ""
            rest = rest.removeprefix(opened)
        return (said, calls) if calls else (text, [])


def rendered_call(name: object, arguments: object, raw: str) -> str:
    """Write a call of the policy in the form that environments read; ``raw``, what was written, if it is none."""
    if isinstance(name, str) and isinstance(arguments, dict):
        return printable(render_tool_call(ToolCall(name, arguments)))  # JSON can spell a lone surrogate
    return unread_call(raw)


def unread_call(text: str) -> str:
    """Write what could not be read as a call in such a form that environments say so."""
    return f"{CALL_OPENS}\n{text}\n{CALL_CLOSES}"


def learned_calls(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Where each JSON object of ``text`` that is :data:`CALLED` begins and ends, and its keys for name and arguments.

    Raises:
        ValueError: braces that are no JSON.
    """
    position = text.find("{")
    while position >= 0:
        written, end = json.JSONDecoder().raw_decode(text, position)
        name = next((key for key, value in written.items() if value == CALLED.name), None)
        wanted = (CALLED.arguments, json.dumps(CALLED.arguments))
        arguments = next((key for key, value in written.items() if value in wanted), None)
        if name is not None and arguments is not None:
            yield position, end, name, arguments
        position = text.find("{", end)
