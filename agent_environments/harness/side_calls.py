"""Reads the rules for calls of a program that do not belong to its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_environments.program_config import words
from agent_environments.program_protocol import SideCalls


def read_side_calls(key: str, value: Any) -> tuple[SideCalls, ...]:
    """Return the rules for calls that are not trained on.

    Raises:
        ValueError: a rule has no condition, or a key or a value that there is not; names ``key`` and the cure.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list of rules, not {value!r}")
    return tuple(_rule(f"{key}[{number}]", rule) for number, rule in enumerate(value))


def _rule(key: str, rule: Any) -> SideCalls:
    conditions = ("model", "system", "tools")
    if not isinstance(rule, Mapping) or not set(rule) <= {*conditions, "by_base"} or not set(rule) & set(conditions):
        raise ValueError(
            f"{key} must hold model, system or tools, and by_base if the base model is to answer: {rule!r}"
        )
    by_base, texts = rule.get("by_base", False), {name: rule[name] for name in ("model", "system") if name in rule}
    if not isinstance(by_base, bool):
        raise ValueError(f"{key}.by_base must be true or false, not {by_base!r}")
    if not all(isinstance(text, str) and text for text in texts.values()):
        raise ValueError(f"{key}: model and system must be texts: {rule!r}")
    tools = frozenset(words(f"{key}.tools", rule["tools"])) if "tools" in rule else None
    return SideCalls(**texts, tools=tools, by_base=by_base)
