"""Prints the keys of configs from the schemas: every key with its type, its default and its sentence."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from loop_formats.schema import fields_of, require, sections_in
from loop_plumbing.names import nearest
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import COMPONENT, LoopConfig
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.warm_start.config import WarmStartConfig
from rollout_server.config import EnvironmentConfig, as_written

RECIPES = {
    "loop train": LoopConfig,
    "loop sft": SftConfig,
    "loop eval": EvalConfig,
    "tune run warm_start_appworld": WarmStartConfig,
}
EXAMPLE = "tiny_cpu"
"""The config that shows values for components, which have no defaults of their own."""
_LISTED_ELSEWHERE = "policies[].endpoint"
"""The section whose keys are those of ``endpoint``."""


def key_lines(prefix: str = "", width: int = 100) -> list[str]:
    """List the keys that begin with ``prefix``: for each recipe the keys that no earlier recipe has. Keys of components
    are in no schema; they are listed as the config :data:`EXAMPLE` sets them.

    Args:
        width: columns of the sentences.

    Raises:
        ConfigError: no key begins with ``prefix``.
    """
    lines = component_lines(prefix, width)
    known: set[tuple[str, ...]] = set()
    for title, section in RECIPES.items():
        matches = [row for row in rows(section) if row[0].startswith(prefix)]
        new = [row for row in matches if row not in known]
        known |= {*matches}
        lines += [f"# {title}", ""] if new else []
        for key, kind, default, text in new:
            lines += [f"{key}: {kind}{f' = {default}' if default else ''}", *wrap(text, width, indent="    ")]
        lines += [""] if new else []
    known_keys = sorted({row[0] for row in known} if known else {row[0] for s in RECIPES.values() for row in rows(s)})
    require(lines, f"no key begins with {prefix!r}; {nearest(prefix, known_keys)}")
    return lines[:-1]


def component_lines(prefix: str, width: int) -> list[str]:
    """List the keys of a component of ``loop train`` that begin with ``prefix``, as :data:`EXAMPLE` sets them, and an
    empty line after them; [] where there are none."""
    config = as_written(compose(EXAMPLE))
    for key, kind, *_ in rows(LoopConfig):
        if kind != "component" or not prefix.startswith(f"{key}."):
            continue
        component = functools.reduce(lambda tree, name: tree[name], key.split("."), config)
        values = {f"{key}.{name}": value for name, value in component.items()}
        matches = {name: value for name, value in values.items() if name.startswith(prefix)} or values
        of = f"Arguments of {component['_component_']}" if "_component_" in component else "Keys"
        text = f"{of}, as {EXAMPLE} sets them; `loop check CONFIG` checks any others."
        return [
            "# loop train",
            "",
            *(f"{name} = `{value}`" for name, value in matches.items()),
            *wrap(text, width, "    "),
            "",
        ]
    return []


def wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def rows(section: type, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, sentence) for each key of ``section``, then for the keys of the sections within it."""
    for name, field in fields_of(section).items():
        key = path + ("<option>" if section is EnvironmentConfig and name == "options" else name)
        inside = sections_in(field.annotation)
        text = _one_line(_sentence(section, name) or (inspect.getdoc(inside[0]) or "" if inside else ""))
        yield key, _kind(field.annotation, field.metadata), _default(field, bool(inside)), text
        if inside and key != _LISTED_ELSEWHERE:
            below = {list: "[]", dict: ".<name>"}.get(get_origin(field.annotation), "")
            yield from rows(inside[0], f"{key}{below}.")


def _sentence(section: type, name: str) -> str | None:
    """Return the string below the field, in ``section`` or a base class."""
    described = [fields_of(base)[name] for base in section.__mro__ if name in getattr(base, "__pydantic_fields__", {})]
    return next((field.description for field in described if field.description), None)


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """Describe a type in the words of YAML."""
    bounds = _bounds(metadata)
    if dataclasses.is_dataclass(annotation):
        return "section"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = ["null" if item is type(None) else _kind(item, []) for item in arguments]
        return " or ".join(kinds) + bounds
    if origin is Literal:
        *others, last = [f"`{value}`" for value in arguments]
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        (item,) = arguments
        return "list of sections" if dataclasses.is_dataclass(item) else f"list of {_kind(item, [])}"
    if origin is dict:
        if COMPONENT in metadata:
            return "component"
        if COMPONENT in getattr(arguments[1], "__metadata__", ()):
            return "components by name"
        return "sections by name" if dataclasses.is_dataclass(arguments[1]) else "mapping"
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__, list(annotation.__metadata__))
    return annotation.__name__ + bounds


def _bounds(metadata: list[Any]) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds: dict[str, float] = {}
    for item in metadata:
        for constraint in [item, *getattr(item, "metadata", [])]:
            bounds |= {name: getattr(constraint, name) for name in words if getattr(constraint, name, None) is not None}
    return "".join(f", {words[name]} {value:g}" for name, value in bounds.items())


def _default(field: FieldInfo, is_section: bool) -> str:
    if field.is_required():
        return ""
    if is_section and field.default is not None:
        return ""
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return "null" if value is None else f"`{value}`"


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())
