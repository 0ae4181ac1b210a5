"""The right answers of a file of functions, as the turns of an agent: to check that its rewards accept them.

The turns come from the file's function ``solve(task)``. Without one, each field of the task that a reward reads is
tried as the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from agent_environments.tool_calls import ToolCall, render_tool_call
from agent_environments.tools.function_tool import FunctionTool
from agent_environments.tools.reward import Reward
from agent_environments.tools.tool import Tool, WrongArguments

SOLVE = "solve"
_TURN = "a turn is a text, or a mapping of tool names to arguments"


def solver_of(value: object) -> Callable[[Any], Any] | None:
    """Return a module's ``solve`` if it is a function of one task; a file may use this name for something else."""
    if not inspect.isfunction(value):
        return None
    try:
        inspect.signature(value).bind({})
    except TypeError:
        return None
    return value


def turns_of(solution: object) -> Generator[Any, Any, Any]:
    """Return a generator of the turns of a task's ``solve``; callers send it the observation after each turn.

    Args:
        solution: the result of ``solve``: one turn, a list of turns, or a generator of turns.

    Raises:
        ValueError: ``solve`` returned anything else.
    """
    if inspect.isgenerator(solution):
        return solution
    whole = [solution] if isinstance(solution, str | Mapping) else solution
    if not isinstance(whole, list | tuple):
        raise ValueError(f"solve gives {solution!r:.80}; {_TURN}, and several stand in a list")
    return (turn for turn in whole)


def written(turn: object) -> str:
    """Return a turn as text: a text as it is, a mapping as the tool calls that it stands for.

    Raises:
        ValueError: the value is not a turn.
    """
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, Mapping) or not all(isinstance(arguments, Mapping) for arguments in turn.values()):
        raise ValueError(f"solve gives the turn {turn!r:.80}; {_TURN}")
    return "\n".join(render_tool_call(ToolCall(name, dict(arguments))) for name, arguments in turn.items())


def field_answers(rewards: Iterable[Reward], tools: Iterable[Tool], task: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (field, turn) for each field of a task that its rewards read. The turn gives the field's value as the
    answer: as text, or as the only argument of a terminal tool.
    """
    read = [name for reward in rewards if reward.weight for name in reward.task_fields]
    values = {name: task[name] for name in dict.fromkeys(read) if task.get(name) is not None}
    terminal = [tool for tool in tools if tool.terminal and isinstance(tool, FunctionTool)]
    if not terminal:
        return [(name, str(value)) for name, value in values.items()]
    turns = [(name, _call(tool, value)) for name, value in values.items() for tool in terminal]
    return [(name, turn) for name, turn in turns if turn is not None]


def _call(tool: FunctionTool, value: Any) -> str | None:
    """Return a terminal tool's call with this value, or its text, as the only argument; None if it takes neither."""
    names = tool.parameters.get("required") or list(tool.parameters["properties"])
    for argument in (value, str(value)) if len(names) == 1 else ():
        arguments = {names[0]: argument}
        try:
            tool.check(arguments)
            return written({tool.name: arguments})
        except (WrongArguments, TypeError, ValueError):
            continue
    return None
