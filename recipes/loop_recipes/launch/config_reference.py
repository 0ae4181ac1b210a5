"""Writes ``docs/config.md`` from the schemas: every key with its type, its default and its sentence.

python -m loop_recipes.launch.config_reference > docs/config.md
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from loop_formats.schema import fields_of, sections_in
from loop_recipes.config.loop_config import COMPONENT, LoopConfig
from loop_recipes.config.sft_config import REFUSED, WHY_REFUSED, SftConfig
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.warm_start.config import WarmStartConfig
from rollout_server.config import NodeConfig

PAGES = {
    "Training: `tune run loop_appworld`": LoopConfig,
    "Training on a fixed set: `tune run sft_appworld`": SftConfig,
    "A rollout node: `rollout-server`, and `node` of the others": NodeConfig,
    "Evaluation: `tune run eval_appworld`": EvalConfig,
    "Warm start: `tune run warm_start_appworld`": WarmStartConfig,
}
_REFUSED: dict[type, tuple[tuple[str, ...], str]] = {SftConfig: (REFUSED, WHY_REFUSED)}
"""Keys that a page's section shares with others and that must be left out there, and why."""
_TOLD_ELSEWHERE = "policies[].endpoint"
"""Its keys are those of ``endpoint``."""
_HEAD = """\
# Keys of the configs

Made from the schemas by `python -m loop_recipes.launch.config_reference`; change the sentences there.

A key without a default must be given. On the command line, `key.below=value` replaces a value and `~key` leaves it out.
A *component* is a mapping whose `_component_` names what to build; its other keys are the arguments. `extends: NAME`
puts a file over another config.
"""


def reference() -> str:
    """The page."""
    return "\n".join([_HEAD, *(_table(title, section) for title, section in PAGES.items())])


def _table(title: str, section: type) -> str:
    refused, why = _REFUSED.get(section, ((), ""))
    lines = [
        f"| `{key}` | {kind} | {default} | {f'Must be left out: {why}.' if key in refused else text} |"
        for key, kind, default, text in rows(section)
    ]
    return "\n".join([f"## {title}", "", "| key | type | default | |", "|---|---|---|---|", *lines, ""])


def rows(section: type, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    for name, field in fields_of(section).items():
        key = path + name
        inside = sections_in(field.annotation)
        text = _one_line(_sentence(section, name) or (inspect.getdoc(inside[0]) or "" if inside else ""))
        yield key, _kind(field.annotation, field.metadata), _default(field, bool(inside)), text
        if inside and inside[0] is not NodeConfig and key != _TOLD_ELSEWHERE:
            below = {list: "[]", dict: ".<name>"}.get(get_origin(field.annotation), "")
            yield from rows(inside[0], f"{key}{below}.")


def _sentence(section: type, name: str) -> str | None:
    """The string below the field, where ``section`` or what it extends defines it."""
    described = [fields_of(base)[name] for base in section.__mro__ if name in getattr(base, "__pydantic_fields__", {})]
    return next((field.description for field in described if field.description), None)


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """A type in the words of YAML."""
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
        return "sections by name" if dataclasses.is_dataclass(arguments[1]) else "mapping"
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__, list(annotation.__metadata__))
    return annotation.__name__ + bounds


def _bounds(metadata: list[Any]) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found: dict[str, float] = {}
    for item in metadata:
        for part in [item, *getattr(item, "metadata", [])]:
            found |= {name: getattr(part, name) for name in words if getattr(part, name, None) is not None}
    return "".join(f", {words[name]} {value:g}" for name, value in found.items())


def _default(field: FieldInfo, is_section: bool) -> str:
    if field.is_required():
        return ""
    if is_section and field.default is not None:
        return ""
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return "null" if value is None else f"`{value}`"


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
