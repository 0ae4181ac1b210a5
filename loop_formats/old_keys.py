"""Keys of configs that have moved: what files, run folders and command lines of the last release say is still read.

Each such key is said once on stderr, with the new one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from agent_environments.protocol import flat_section
from loop_formats.schema import ConfigError

MOVED = {"rollout_node.config": "node"}
"""The key of a section -> its present key."""
GONE = {
    "collection.sampling": (
        {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "training samples at temperature 1.0, top_p 1.0, top_k -1, since otherwise the sampled log-probs are not the "
        "policy's, and the ratios are biased (evaluation may sample as it likes)",
    )
}
"""The key of a section that is no more -> the only values it took, and why."""
_OPTIONS = re.compile(r"((?:^|\.)environment(?:(?:\.config)?\.(?:environments\.[^.]+|world))*)\.config(?=\.)")
_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_said: set[str] = set()


def say_once(line: str) -> None:
    """Print ``line`` to stderr, once in this process; of several ranks the first does."""
    if line not in _said and int(os.environ.get("RANK", 0)) == 0:
        print(line, file=sys.stderr)
    _said.add(line)


def present_key(key: str) -> str:
    """The present name of a dotted key."""
    for before, after in MOVED.items():
        if key == before or key.startswith(f"{before}."):
            key = after + key.removeprefix(before)
            say_once(f"loop: {before} is {after} now; the old key works for one release")
    while match := _OPTIONS.search(key):
        key = key[: match.start()] + match.group(1) + key[match.end() :]
        _say_flat()
    return key


def is_gone(key: str, value: object) -> bool:
    """Whether the dotted ``key`` is of a section that is no more.

    Raises:
        ConfigError: it is, and ``value`` is another than the one that it took.
    """
    for gone, (only, why) in GONE.items():
        if key == gone or key.startswith(f"{gone}."):
            below = key.removeprefix(f"{gone}.")
            given = value if key == gone else {below: value}
            if not isinstance(given, Mapping) or any(only.get(name) != item for name, item in given.items()):
                raise ConfigError(f"{gone} is no key any more: {why}")
            say_once(f"loop: {gone} is no key any more, leave it out; it works for one release")
            return True
    return False


def present_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A config's content under its present keys, those in interpolations included.

    Raises:
        ConfigError: a section that is no more, with other values than it took.
    """
    result: dict[str, Any] = _texts(tree)
    for before, after in MOVED.items():
        if (found := _taken(result, before)) is not None:
            result[present_key(before)] = {**found, **(result.get(after) or {})} if isinstance(found, dict) else found
    for gone in GONE:
        if (found := _taken(result, gone)) is not None:
            is_gone(gone, found)
    for holder in (result, result.get("node")):
        if isinstance(holder, dict) and isinstance(section := holder.get("environment"), dict):
            try:
                holder["environment"] = flat_section(section)
            except ValueError as error:
                raise ConfigError(f"environment: {error}") from error
            if holder["environment"] != section:
                _say_flat()
    return result


def _taken(tree: dict[str, Any], key: str) -> Any:
    """The value of a key below a section, taken out of ``tree``; None if it is not there."""
    outer, inner = key.split(".")
    section = tree.get(outer)
    return section.pop(inner, None) if isinstance(section, dict) else None


def _texts(value: Any) -> Any:
    """A copy of ``value`` with present keys in its interpolations."""
    if isinstance(value, Mapping):
        return {key: _texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_texts(item) for item in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: f"${{{present_key(match.group(1))}}}", value)
    return value


def _say_flat() -> None:
    say_once("loop: an environment's options stand beside its name, not under config; the old form works one release")
