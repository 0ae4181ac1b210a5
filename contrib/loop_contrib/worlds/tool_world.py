"""Worlds that are played by tool calls: between the policy's text and a worker's lists of calls.

The system message offers the tools, a turn may hold several calls, and each is answered. These are the texts of
:mod:`agent_environments.tool_calls`, and the mistakes have the words of :mod:`agent_environments.tools.answer`, so that
one count of tool behaviour serves both kinds of environment.
"""

from __future__ import annotations

import json
from typing import Any

from agent_environments.description import TOOLS_BEHAVIOR
from agent_environments.protocol import Message
from agent_environments.tool_calls import (
    BadCall,
    ToolCall,
    parse_tool_calls,
    render_tool_call,
    tools_section,
)
from agent_environments.tools.answer import FAILED, NO_CALL, joined_results, mistake_of
from loop_contrib.worlds.pool import WorldPool
from loop_plumbing.sanitize import printable


class ToolWorldPool(WorldPool):
    """A pool whose commands are JSON lists of calls and whose observations are JSON lists of results
    (``workers/worker_loop.py``).
    """

    description = WorldPool.description.with_behavior(TOOLS_BEHAVIOR)
    no_command = NO_CALL
    _schemas: tuple[dict[str, Any], ...] = ()

    def _learn(self, answer: dict[str, Any]) -> None:
        super()._learn(answer)
        self._schemas = tuple(answer["tools"])

    @property
    def tool_names(self) -> list[str]:
        """Return the names of the tools that the policy may call, in the order of the system message."""
        return [schema["function"]["name"] for schema in self._schemas]

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        system = Message("system", f"{answer['instructions']}\n\n{tools_section(self._schemas)}")
        return [system, Message("user", printable(answer["observation"]))]

    def command(self, message: str) -> str | None:
        calls = parse_tool_calls(message)
        return json.dumps([self._item(call) for call in calls]) if calls else None

    def _item(self, call: ToolCall | BadCall) -> dict[str, Any]:
        if isinstance(call, BadCall) or call.name not in self.tool_names:
            return {"mistake": mistake_of(call, self.tool_names)}
        return {"name": call.name, "arguments": call.arguments}

    def message(self, command: str) -> str:
        return "\n".join(render_tool_call(ToolCall(call["name"], call["arguments"])) for call in json.loads(command))

    def observation_text(self, observation: str) -> str:
        results = [printable(_text(item)) for item in json.loads(observation)]
        return joined_results(results, self.observation_max_tokens, self.token_spans)


def _text(item: dict[str, str]) -> str:
    match item:
        case {"result": str(text)} | {"mistake": str(text)}:
            return text
        case {"error": str(text)}:
            return f"{FAILED}{text}"
    raise ValueError(f"a worker's answer to a call is malformed: {str(item)[:200]}")
