"""What a file of functions itself calls right, as the turns of an agent: to see that its rewards know it.

The turns come from the file's function ``solve(task)``. Without one, each field of the task that a reward reads is
tried as the answer.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from agent_environments.tool_calls import ToolCall, render_tool_call
from agent_environments.tools.function_tool import FunctionTool
from agent_environments.tools.tool import WrongArguments, as_text

if TYPE_CHECKING:
    from agent_environments.tools.module import ToolModule

SOLVE = "solve"
_TURN = "a turn is a text, or a mapping of tool names to arguments"


def solver_of(value: object) -> Callable[[Any], Any] | None:
    """Return a module's ``solve`` if it is a function of one task; a file may call something else so."""
    if not inspect.isfunction(value):
        return None
    try:
        inspect.signature(value).bind({})
    except TypeError:
        return None
    return value


class Solving:
    """The turns of one task's ``solve``: given whole, or one by one by a generator, which is sent what it was answered.

    Args:
        given: what ``solve`` returned: a turn, several in a list, or a generator of turns.

    Raises:
        ValueError: it gives anything else.
    """

    def __init__(self, given: object) -> None:
        self._generator = cast("Generator[Any, str, Any]", given) if inspect.isgenerator(given) else None
        whole = [given] if isinstance(given, str | Mapping) else given
        if self._generator is None and not isinstance(whole, list | tuple):
            raise ValueError(f"solve gives {given!r:.80}; {_TURN}, and several stand in a list")
        self._turns: Iterator[Any] = iter(()) if self._generator is not None else iter(whole)  # type: ignore[call-overload]
        self._begun = False

    def next(self, said: str) -> str | None:
        """Return the next turn's text, once the turn before was answered with ``said``; None after the last."""
        try:
            if self._generator is None:
                turn = next(self._turns)
            elif self._begun:
                turn = self._generator.send(said)
            else:
                self._begun = True
                turn = next(self._generator)
        except StopIteration:
            return None
        return written(turn)


def written(turn: object) -> str:
    """Return a turn's text: as it is, or the calls that it makes.

    Raises:
        ValueError: it is no turn.
    """
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, Mapping) or not all(isinstance(arguments, Mapping) for arguments in turn.values()):
        raise ValueError(f"solve gives the turn {turn!r:.80}; {_TURN}")
    return "\n".join(render_tool_call(ToolCall(name, dict(arguments))) for name, arguments in turn.items())


def field_answers(module: ToolModule, task: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the fields of a task that its rewards read, each with a turn that gives it as the answer; the likeliest
    first, and one field perhaps in several forms.
    """
    read = [name for reward in module.rewards if reward.weight for name in reward.task_fields if name in task]
    terminal = [tool for tool in module.tools.values() if tool.terminal and isinstance(tool, FunctionTool)]
    found: list[tuple[str, str]] = []
    for name in dict.fromkeys(read):
        for value in _forms(task[name]):
            if not terminal:
                found.append((name, value if isinstance(value, str) else str(value)))
            found += [(name, turn) for tool in terminal for turn in _calls(tool, value)]
    return list(dict.fromkeys(found))


def _forms(value: Any) -> list[Any]:
    """Return a value as it is, as text, and the first of several, any of which may be the right one."""
    if value is None:
        return []
    first = next(iter(value), None) if isinstance(value, list | tuple) else None
    return [value, as_text(value), *([] if first is None else [first, as_text(first)])]


def other_forms(value: Any) -> list[str | int | float]:
    """Return a field's value as text, or a text as a number or written otherwise: what a reward may take it for."""
    if isinstance(value, str):
        forms: list[Any] = [value.strip(), *_numbers(value), value.lower(), value.upper()]
    else:
        found = _forms(value)  # of several the first, as a text that holds all of them is nobody's answer
        forms = [form if isinstance(form, str) else str(form) for form in found[2:] or found]
    return [form for form in dict.fromkeys(forms) if form != value]


def _numbers(text: str) -> list[int | float]:
    found: list[int | float] = []
    for kind in (int, float):
        try:
            found.append(kind(text))
        except ValueError:
            continue
    return found[:1]


def unlike(answer: str, name: str, task: Mapping[str, Any]) -> str:
    """Say what an answer is, and what a field of the task is, with their types."""
    value = task[name]
    of = f"the field {name} of task {task['id']}"
    return f"answer is the text {answer!r:.80}, and {of} is {kind_of(value)} {value!r:.80}"


def kind_of(value: Any) -> str:
    """Return what a value is, for a sentence."""
    if isinstance(value, str):
        return "the text"
    if isinstance(value, bool):
        return "the truth value"
    return "the number" if isinstance(value, numbers.Number) else f"the {type(value).__name__}"


def _calls(tool: FunctionTool, value: Any) -> list[str]:
    """Return the call of a terminal tool with this value as its one argument, if it takes that."""
    names = tool.parameters.get("required") or list(tool.parameters["properties"])
    arguments = dict.fromkeys(names, value)
    try:
        tool.check(arguments)
        return [written({tool.name: arguments})] if len(names) < 2 else []
    except (WrongArguments, TypeError, ValueError):
        return []
