"""The answer to one call in an agent's turn: the tool's result, or what was wrong with the call, as text.

Each kind of mistake begins with words of its own, so that :mod:`agent_environments.tools.behavior` can count it in any
stored conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_environments.breakage import Raised, told
from agent_environments.observation import printable
from agent_environments.protocol import EnvironmentTimeout, ToolUse
from agent_environments.tool_calls import BadCall, ToolCall
from agent_environments.tools.deadline import DeadlinePassed
from agent_environments.tools.instances import Lease
from agent_environments.tools.tool import Tool, ToolError, WrongArguments, as_text

BAD_CALL = "Error: this is no tool call: "
UNKNOWN_TOOL = "Error: there is no tool "
WRONG_ARGUMENTS = "Error: wrong arguments for "
FAILED = "Error: the tool failed: "
NO_CALL = "Error: there is no tool call. Write one, or several, within <tool_call></tool_call>."
CUT = "\n... (the result is too long and is not fully shown)"


@dataclass(frozen=True)
class Answer:
    """What the policy reads.

    ``ended_with`` is the whole result of a terminal tool, which ends the episode; None if it goes on. ``use`` counts
    the call, unless the tool was never asked.
    """

    text: str
    failed: bool = False
    ended_with: str | None = None
    use: ToolUse | None = None


async def answer(call: ToolCall | BadCall, tools: Mapping[str, Tool], lease: Lease) -> Answer:
    """Make a call and say what came of it.

    Raises:
        EnvironmentTimeout: a stateful tool took too long; its instance may still be changing.
    """
    if isinstance(call, BadCall):
        return _mistake(f"{BAD_CALL}{call.error}")
    tool = tools.get(call.name)
    if tool is None:
        return _mistake(f"{UNKNOWN_TOOL}{call.name!r}; there are {', '.join(tools)}")
    try:
        arguments = tool.check(call.arguments)
    except WrongArguments as error:
        return _mistake(f"{WRONG_ARGUMENTS}{tool.name}: {error}")
    try:
        result = as_text(await _call(tool, arguments, lease))
    except (ToolError, DeadlinePassed) as error:
        return _failure(tool, str(error), told(error.__cause__) if isinstance(error.__cause__, Raised) else str(error))
    except ValueError as error:  # of the result: nothing that is text or JSON
        what = f"its result cannot be shown: {error}"
        return _failure(tool, what, what)
    ended_with = printable(result) if tool.terminal else None
    return Answer(_shown(result, tool.max_characters), ended_with=ended_with, use=ToolUse(tool.name, 1, 0))


async def _call(tool: Tool, arguments: dict[str, Any], lease: Lease) -> object:
    if not tool.stateful:
        return await tool.call(arguments, None)
    lease.broken = True  # unless the call returns: one that was cancelled may still be at work
    try:
        result = await tool.call(arguments, lease.instance)
    except DeadlinePassed as error:
        raise EnvironmentTimeout(f"tool {tool.name} {error}") from error
    except ToolError:
        lease.broken = False
        raise
    lease.broken = False
    return result


def _mistake(text: str) -> Answer:
    return Answer(_shown(text, 500), failed=True)


def _failure(tool: Tool, shown: str, what: str) -> Answer:
    """What the policy is shown of a call that failed, and what the record says of it."""
    use = ToolUse(tool.name, 1, 1, printable(what))
    return Answer(_shown(f"{FAILED}{shown}", tool.max_characters), failed=True, use=use)


def _shown(text: str, max_characters: int) -> str:
    text = printable(text)
    return text if len(text) <= max_characters else text[:max_characters] + CUT
