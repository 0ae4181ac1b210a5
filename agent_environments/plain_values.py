"""Rebuilds the values that an environment hands over from plain Python values.

A grade that was computed with numpy holds numpy's booleans, which JSON cannot write; one that was computed carelessly
holds NaN, a list in place of a text, or success with a reward of 0. If the error came up only when the episode is
written, it would void the episode, and an agent could cause it. So values are made plain, or refused, here.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_args

from agent_environments.protocol import Broke, Grade, Message, Requirement, Role, StepResult, ToolUse
from loop_plumbing.sanitize import printable, sanitize

MOST_ITEMS = 1000
"""Items of each kind in a grade: any of them may hold an agent's words, and each sequence's record has them all."""
MOST_CHARACTERS = 1000
"""Characters of a name, a reason or a requirement in a grade."""


def plain_messages(messages: Any) -> list[Message]:
    """Return the opening of an episode in plain values.

    Raises:
        ValueError: the value is not an opening; the message names the fault.
    """
    opening = [_instance("an opening message", message, Message) for message in _sequence("the opening", messages)]
    for message in opening:
        if message.role not in get_args(Role):
            raise ValueError(f"the role of an opening message is one of {', '.join(get_args(Role))}")
    return [Message(message.role, _text("an opening message", message.content)) for message in opening]


def plain_result(result: Any) -> StepResult:
    """Return the answer to an action in plain values.

    Raises:
        ValueError: the value is not a StepResult; the message names the field.
    """
    _instance("what step returned", result, StepResult)
    return StepResult(
        observation=_text("StepResult.observation", result.observation),
        done=_truth("StepResult.done", result.done),
        failed=_truth("StepResult.failed", result.failed),
        empty_action=_truth("StepResult.empty_action", result.empty_action),
        reminder=_text("StepResult.reminder", result.reminder),
        broke=_broke("StepResult.broke", result.broke),
        tools=_tools("StepResult.tools", result.tools),
        reward=None if result.reward is None else _number("StepResult.reward", result.reward, -math.inf, math.inf),
    )


def plain_grade(grade: Any) -> Grade:
    """Return the grade of an episode in plain values. An ungradable state gets reward 0, whatever else the grade says.

    Raises:
        ValueError: the value is not a Grade, or contradicts itself (success with reward 0 or an unmet requirement);
            the message names the field.
    """
    _instance("what grade returned", grade, Grade)
    plain = Grade(
        reward=_number("Grade.reward", grade.reward, 0.0, 1.0),
        success=_truth("Grade.success", grade.success),
        requirements=tuple(map(_requirement, _sequence("Grade.requirements", grade.requirements)[:MOST_ITEMS])),
        ungradable=_short_or_none("Grade.ungradable", grade.ungradable),
        broke=_broke("Grade.broke", grade.broke),
        tools=_tools("Grade.tools", grade.tools),
        rewards=_figures("Grade.rewards", grade.rewards),
        metrics=_figures("Grade.metrics", grade.metrics),
    )
    if plain.ungradable is not None:
        return replace(plain, reward=0.0, success=False)
    if plain.success and plain.reward == 0.0:
        raise ValueError("Grade.success is true, and Grade.reward is 0: success means that all requirements are met")
    if plain.success and not all(requirement.passed for requirement in plain.requirements):
        raise ValueError("Grade.success is true, though one of Grade.requirements has not passed")
    return plain


def _requirement(item: Any) -> Requirement:
    _instance("an item of Grade.requirements", item, Requirement)
    return Requirement(
        text=_short("Requirement.text", item.text),
        passed=_truth("Requirement.passed", item.passed),
        no_op_pass=_truth("Requirement.no_op_pass", item.no_op_pass),
    )


def _instance(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be of type {kind.__name__}, and is of type {type(value).__name__}")
    return value


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a tuple or a list, not of type {type(value).__name__}")
    return value


def scalar(value: Any) -> Any:
    """Convert a numpy or torch scalar, a decimal or a fraction to Python's own type; return other values unchanged."""
    if isinstance(value, Decimal | Fraction):
        return float(value)
    try:
        return value.item() if hasattr(value, "dtype") else value
    except (ValueError, RuntimeError):  # several numbers
        return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    """Return a finite number within the bounds; raises ValueError for any other value, NaN included."""
    number = scalar(value)
    real = isinstance(number, numbers.Real)
    if not real or not math.isfinite(number) or not low <= float(number) <= high:
        description = repr(float(number)) if real else f"of type {type(value).__name__}"
        wanted = "not a finite number" if math.isinf(low) else f"not a number in [{low:g}, {high:g}]"
        raise ValueError(f"{name} is {description}, which is {wanted}")
    return float(number)


def _figures(name: str, value: Any) -> dict[str, float]:
    _instance(name, value, Mapping)
    named = {_short(name, key): each for key, each in itertools.islice(value.items(), MOST_ITEMS)}
    return {key: _number(f"{name}[{key!r}]", each, -math.inf, math.inf) for key, each in named.items()}


def _truth(name: str, value: Any) -> bool:
    truth = scalar(value)
    if not isinstance(truth, bool) and not (isinstance(truth, int) and truth in (0, 1)):
        kind = "NaN" if isinstance(truth, float) and math.isnan(truth) else f"of type {type(value).__name__}"
        raise ValueError(f"{name} is {kind}, and neither True nor False")
    return bool(truth)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text but of type {type(value).__name__}")
    return printable(value)


def _short(name: str, value: Any) -> str:
    """Return a grade's text, shortened and safe to print on a terminal."""
    return sanitize(_text(name, value), MOST_CHARACTERS)


def _short_or_none(name: str, value: Any) -> str | None:
    return None if value is None else _short(name, value)


def _broke(name: str, value: Any) -> Broke | None:
    if value is None:
        return None
    _instance(name, value, Broke)
    return Broke(_short(f"{name}.where", value.where), _short(f"{name}.what", value.what))


def _tools(name: str, value: Any) -> tuple[ToolUse, ...]:
    uses = [_instance(f"an item of {name}", item, ToolUse) for item in _sequence(name, value)[:MOST_ITEMS]]
    return tuple(
        ToolUse(_short(name, use.tool), int(use.calls), int(use.raised), _short(name, use.what)) for use in uses
    )
