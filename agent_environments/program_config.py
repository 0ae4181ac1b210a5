"""The config of a program: its command, its variables, which YAML may have read as something else, and its rules."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from agent_environments.program_protocol import SideCalls


def words(key: str, value: Any) -> list[str]:
    """A list of words, numbers among them as text.

    Raises:
        ValueError: it is one text, or something that is no word; names ``key`` and the cure.
    """
    if isinstance(value, str):
        raise ValueError(f"{key} must be a list of words: write {json.dumps(shlex.split(value))}, not {value!r}")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list of words, not {value!r}")
    return [_text(key, word) for word in value]


def variables(key: str, value: Any) -> dict[str, str]:
    """Environment variables, numbers and truth values as the text that YAML read them from.

    Raises:
        ValueError: it is no mapping of such values; names ``key`` and the cure.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping of names to texts, not {value!r}")
    return {_text(key, name): _text(f"{key}.{name}", each) for name, each in value.items()}


def side_calls(key: str, value: Any) -> tuple[SideCalls, ...]:
    """The rules for calls that are not trained on.

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


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise ValueError(f"{key} holds {value!r}, which is no text: put it in quotes")
    return str(value)
