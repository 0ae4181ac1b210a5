"""Sections of a configuration: checked by pydantic, refused in one line that names the key and the cure.

A section is a :func:`pydantic.dataclasses.dataclass` with ``frozen=True, config=STRICT``. A field whose type is another
section is a section inside it, a field without a default a required key, and the string below a field the sentence that
`loop check --keys` prints for its key. ``__post_init__`` checks further conditions with :func:`require`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails, to_json

from loop_plumbing.grouping import grouped
from loop_plumbing.names import did_you_mean, folded, nearest, similar_names

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

Seed = Annotated[int, Field(ge=-(2**62), le=2**62)]
"""The seed of a run, with room in 64 bits for numbers that are added to it."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Item = TypeVar("Item")
Some = Annotated[list[Item], Field(min_length=1)]
"""A list that is not empty: for a key that may be null, an empty list does not mean all."""
Section = TypeVar("Section")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}

_WANTED = {
    "int_type": "int",
    "float_type": "float",
    "finite_number": "a finite number",
    "bool_type": "bool",
    "string_type": "str",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "string_pattern_mismatch": "of the form {pattern}",
    "literal_error": "{expected}",
}

TYPING_ERROR = 0.85
"""The similarity, by difflib's ratio, of two names that differ by a typing error."""
MOST_LISTED = 15
"""Keys that an error names where none resembles the unknown one."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line."""


def require(holds: object, message: str) -> None:
    """Raise ConfigError unless ``holds``. In a section's ``__post_init__``, a message that begins with a field's name
    gets the section's path as prefix."""
    if not holds:
        raise ConfigError(message)


def made_folder(key: str, folder: Path) -> Path:
    """Return the folder that the setting ``key`` names; make the folder if it is missing.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key} {folder} cannot be created: {error.strerror}; choose another") from error
    return folder


def from_mapping(section: type[Section], data: object, path: str = "") -> Section:
    """Build ``section`` from plain data; errors name ``path``, the section's position in the whole config.

    Raises:
        ConfigError: an unknown or missing key, a value of another type or out of range.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a mapping, not {type(data).__name__}")
    try:
        # Strict validation accepts mappings in JSON as sections, but only instances as Python objects.
        return _adapter(section).validate_json(to_json(data, inf_nan_mode="constants"))
    except ValidationError as error:
        errors = error.errors(include_url=False)
    raise ConfigError(_line(section, data, path, errors))


def check_value(key: str, kind: object, value: object) -> None:
    """Check that a value fits a section's key of the type ``kind``, if JSON can express that type.

    Raises:
        ConfigError: the value is of another type, or not finite.
    """
    path, _, name = key.rpartition(".")
    section = dataclasses.make_dataclass("Section", [(name, kind)])
    errors: list[ErrorDetails] = []
    try:
        adapter = TypeAdapter(dataclass(section, config={**STRICT, "arbitrary_types_allowed": True}))
        adapter.validate_json(to_json({name: value}, inf_nan_mode="constants"))
    except PydanticUserError:  # a type that pydantic does not know
        return
    except ValidationError as error:
        errors = [each for each in error.errors(include_url=False) if each["type"] in _WANTED]
    if errors:
        raise ConfigError(_line(section, {name: value}, path, errors))


def _adapter(section: type[Section]) -> TypeAdapter[Section]:
    if section not in _ADAPTERS:
        _ADAPTERS[section] = TypeAdapter(section)
    return _ADAPTERS[section]


def _line(section: type, data: object, path: str, errors: list[ErrorDetails]) -> str:
    """Return a line for the first of ``errors``; a misspelt key counts before the missing key that was meant."""
    order = {"unexpected_keyword_argument": 0, "missing": 1}
    first = min(errors, key=lambda error: order.get(error["type"], 2))
    where = _place(data, first)
    key = _join(path, where)
    if first["type"] == "unexpected_keyword_argument":
        *above, unknown = first["loc"]
        cure = (
            nearest(str(unknown), _fields(section, above)) if above or path else _of_whole(section, data, str(unknown))
        )
        return f"unknown key {key!r}; {cure}"
    if first["type"] == "missing":
        return f"missing key {key!r}"
    if first["type"] == "value_error":
        return _of_section(str(first["ctx"]["error"]), key, _fields(section, first["loc"]))
    # A union reports once for each of its types.
    same = [error for error in errors if _place(data, error) == where and error["type"] in _WANTED]
    if not same:
        return f"{key}: {first['msg']}"
    wanted = dict.fromkeys(_WANTED[error["type"]].format(**error.get("ctx", {})).replace("'", "") for error in same)
    # YAML reads 1099290_1 as a number.
    cure = "; put quotes around it" if "str" in wanted and isinstance(first["input"], int | float) else ""
    return f"{key} must be {' or '.join(wanted)}, not {first['input']!r}{cure}"


def _of_whole(section: type, data: object, unknown: str) -> str:
    """Return advice on a key that ``section`` itself does not have."""
    if near := keys_meant(section, data, unknown):
        return did_you_mean(near)
    own = [*fields_of(section)]
    return f"known keys: {', '.join(own)}" if len(own) <= MOST_LISTED else "`loop check --keys` prints all keys"


def keys_meant(section: type, data: object, name: str) -> list[str]:
    """Return at most three keys that ``name`` may be a misspelling of: keys of ``section``, of the sections within it,
    or of ``data``, a config of the section."""
    paths = [*dict.fromkeys([*_paths_of(data), *_paths_in(section)])]
    by_name = grouped((path.rpartition(".")[2], path) for path in paths)
    if exact := [path for path in paths if folded(name) in (folded(path), folded(path.rpartition(".")[2]))]:
        return exact[:1]
    own = [*fields_of(section)]
    if near := similar_names(name, own, TYPING_ERROR):
        return near
    if deeper := [path for near in similar_names(name, [*by_name], TYPING_ERROR) for path in by_name[near]]:
        return deeper[:3]
    # Short names are alike by chance in two of three letters: `sleep` does not mean `seed`.
    return similar_names(name, own, 0.6 if len(name) > 5 else 0.7)


def _paths_of(data: object, path: str = "") -> Iterator[str]:
    """Yield the paths of the nested keys of ``data``."""
    for key, value in data.items() if isinstance(data, Mapping) else ():
        if path:
            yield f"{path}{key}"
        yield from _paths_of(value, f"{path}{key}.")


def _paths_in(section: type, path: str = "") -> Iterator[str]:
    """Yield the paths of the keys that the sections within ``section`` take."""
    for key, field in fields_of(section).items():
        if path:
            yield f"{path}{key}"
        for inner in sections_in(field.annotation) if get_origin(field.annotation) is not list else ():
            yield from _paths_in(inner, f"{path}{key}.")


def _of_section(message: str, key: str, fields: Sequence[str]) -> str:
    if not key:
        return message
    first_word = message.split(maxsplit=1)[0].split(".")[0].rstrip(":,")
    return f"{key}.{message}" if first_word in fields else f"{key}: {message}"


def _place(data: object, error: ErrorDetails) -> str:
    """Return the key that an error is about, without the member of a union that pydantic appends."""
    place = ""
    for name in error["loc"]:
        if isinstance(data, Mapping) and name in data:
            place, data = _join(place, str(name)), data[name]
        elif isinstance(data, list) and isinstance(name, int):
            place, data = f"{place}[{name}]", data[name]
        elif error["type"] == "missing":
            place = _join(place, str(name))
    return place


def _fields(section: type, loc: Sequence[int | str]) -> list[str]:
    """Return the names of the keys of the section at ``loc``; [] if ``loc`` leads to a value."""
    for name in loc:
        if isinstance(name, str) and (field := fields_of(section).get(name)) is not None:
            if not (inner := sections_in(field.annotation)):
                return []
            section = inner[0]
    return list(fields_of(section))


def fields_of(section: type) -> dict[str, Any]:
    """Return pydantic's description of each field of ``section``."""
    return section.__pydantic_fields__  # type: ignore[attr-defined]


def sections_in(annotation: Any) -> list[type]:
    """Return the sections in a type: the type itself, the alternative to None, or the items of a list."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]  # type: ignore[list-item]
    return [section for inner in getattr(annotation, "__args__", ()) for section in sections_in(inner)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name
