"""The answer to one call in an agent's turn: the tool's result, or the error in the call, as text.

Each kind of mistake begins with words of its own, so that :mod:`agent_environments.tools.behavior` can count it in any
stored conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_environments.observation import truncate
from agent_environments.protocol import TokenSpans, ToolUse
from agent_environments.tool_calls import BadCall, ToolCall, render_tool_response
from agent_environments.tools.instances import Lease
from agent_environments.tools.tool import Tool, ToolError, WrongArguments
from loop_plumbing.breakage import Raised, error_line
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import ProcessEnded
from loop_plumbing.sanitize import printable

BAD_CALL = "Error: this is no tool call: "
UNKNOWN_TOOL = "Error: there is no tool "
WRONG_ARGUMENTS = "Error: wrong arguments for "
FAILED = "Error: the tool failed: "
NO_CALL = "Error: there is no tool call. Write one, or several, within <tool_call></tool_call>."
_OPENS, _CLOSES = render_tool_response("").splitlines()[0], render_tool_response("").splitlines()[-1]
CUT = "\n... (the result is too long and is not fully shown)"


@dataclass(frozen=True)
class CallAnswer:
    """The text that the policy reads after a tool call, and the call's consequences.

    ``ended_with`` is the whole result of a terminal tool, which ends the episode; None if the episode goes on. ``over``
    says that the episode ends for another reason. ``use`` counts the call; None if no tool was called.
    """

    text: str
    failed: bool = False
    ended_with: str | None = None
    over: bool = False
    use: ToolUse | None = None


async def answer(call: ToolCall | BadCall, tools: Mapping[str, Tool], lease: Lease) -> CallAnswer:
    """Make a call and return its result, or the error, as the agent's answer.

    Raises:
        EnvironmentTimeout: a stateful tool took too long; the instance may be half changed.
    """
    if isinstance(call, BadCall) or (tool := tools.get(call.name)) is None:
        return _mistake(mistake_of(call, tools))
    try:
        result = await _call(tool, call.arguments, lease)
    except WrongArguments as error:
        return _mistake(f"{WRONG_ARGUMENTS}{tool.name}: {error}")
    except (ToolError, DeadlinePassed) as error:
        return _failure(
            tool, str(error), error_line(error.__cause__) if isinstance(error.__cause__, Raised) else str(error)
        )
    except ProcessEnded as error:
        return _failure(tool, str(error), str(error), over=lease.holds_instance)
    ended_with = printable(result) if tool.terminal else None
    return CallAnswer(_cut_text(result, tool.max_characters), ended_with=ended_with, use=ToolUse(tool.name, 1, 0))


def mistake_of(call: ToolCall | BadCall, tools: Iterable[str]) -> str:
    """Return the error text for a malformed call, or for a call of an unknown tool."""
    if isinstance(call, BadCall):
        return f"{BAD_CALL}{call.error}"
    return f"{UNKNOWN_TOOL}{call.name!r}; there are {', '.join(tools)}"


async def _call(tool: Tool, arguments: Mapping[str, Any], lease: Lease) -> str:
    process = await lease.process()
    if not tool.stateful:
        return await tool.call(arguments, process)
    with lease.at_work(f"tool {tool.name}"):
        return await tool.call(arguments, process)


def joined_results(results: Sequence[str], max_tokens: int, token_spans: TokenSpans) -> str:
    """Join the results of a turn's calls, in order, to one observation, cut to the given number of tokens."""
    whole = render_tool_response(*results)
    cut = truncate(whole, max_tokens, token_spans)
    if cut == whole:
        return whole
    is_open = cut.rfind(_OPENS) > cut.rfind(_CLOSES)  # an open mark is closed, so that the rest reads as a result
    return f"{cut}\n{_CLOSES}" if is_open else cut


def _mistake(text: str) -> CallAnswer:
    return CallAnswer(_cut_text(text, 500), failed=True)


def _failure(tool: Tool, text: str, what: str, over: bool = False) -> CallAnswer:
    """Return the answer to a call that failed: the text for the policy, and ``what`` for the record."""
    use = ToolUse(tool.name, 1, 1, printable(what))
    return CallAnswer(_cut_text(f"{FAILED}{text}", tool.max_characters), failed=True, over=over, use=use)


def _cut_text(text: str, max_characters: int) -> str:
    text = printable(text)
    return text if len(text) <= max_characters else text[:max_characters] + CUT
