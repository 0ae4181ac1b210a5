"""Tool calls between the form that a model writes them in and the one that environments read.

A template's form is learned from calls that it writes: JSON objects (:class:`ObjectCalls`), a name and an object of its
arguments (:class:`NamedCalls`), or a name and each argument between marks (:class:`MarkedCalls`).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from agent_environments.tool_calls import CALL_CLOSES, CALL_OPENS, STRICT_JSON, ToolCall, render_tool_call
from loop_plumbing.sanitize import printable

CALLED = ToolCall("qwname", {"qwkey": "qwvalue"})
OFFERED = {
    "type": "function",
    "function": {
        "name": CALLED.name,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"qwkey": {"type": "string", "description": "A value."}}},
    },
}
"""A call of a tool that no task has, and its schema: the form of a template is learned from them."""
_BARE, _NUMBER = ToolCall(CALLED.name, {}), ToolCall(CALLED.name, {"qwkey": 70707})
_SEVERAL = ToolCall(CALLED.name, {"qwkey": "qwvalue", "qwlast": "qwend"})
_ODD = ToolCall(CALLED.name, {"qwkey": 'a "b"\n é', "n": 1, "list": [{"x": "y"}, 2.5]})
Call = tuple[object, object]
"""A name and arguments, as they were written."""


@dataclass(frozen=True)
class CallForm(ABC):
    """The form in which a template writes tool calls; ``opens`` is the text before the first call of a turn."""

    opens: str

    @abstractmethod
    def read(self, text: str) -> tuple[str, list[Call]]:
        """Return the text before the calls, and the calls.

        Raises:
            ValueError, KeyError, RecursionError: the text has calls in another form.
        """


@dataclass(frozen=True)
class ObjectCalls(CallForm):
    """Calls written as JSON objects. The fields are the keys of name and arguments, and the text between two calls."""

    between: str
    name: str
    arguments: str

    def read(self, text: str) -> tuple[str, list[Call]]:
        mark = self.opens.strip()
        before, opened, rest = text.partition(mark) if mark else ("", text.lstrip()[:1] == "{" and "{", text)
        calls: list[Call] = []
        while opened:
            written, end = json.JSONDecoder().raw_decode(rest := rest.lstrip())
            if not isinstance(written, dict):
                raise ValueError("a call is an object")
            arguments = written[self.arguments]
            calls.append((written[self.name], json.loads(arguments) if isinstance(arguments, str) else arguments))
            rest = rest[end:].lstrip()
            opened = self.between.strip() if rest.startswith(self.between.strip()) and rest else ""
            rest = rest.removeprefix(opened)
        return (before, calls) if calls else (text, [])


@dataclass(frozen=True)
class NamedCalls(CallForm):
    """Calls written as a name and an object. ``quote`` encloses the object's strings; its keys may be unquoted."""

    before_object: str
    quote: str
    closes: str

    def read(self, text: str) -> tuple[str, list[Call]]:
        mark = self.opens.strip()
        before, opened, rest = text.partition(mark)
        rest = self._as_json(opened + rest)
        calls: list[Call] = []
        while opened and rest.startswith(mark):
            start = rest.index("{")
            name = rest[len(mark) : start].strip().removesuffix(self.before_object.strip())
            arguments, end = json.JSONDecoder().raw_decode(rest, start)
            calls.append((name, arguments))
            rest = rest[end:].lstrip().removeprefix(self.closes.strip()).lstrip()
        return (before, calls) if calls else (text, [])

    def _as_json(self, text: str) -> str:
        if self.quote == '"':
            return text
        pieces = text.split(self.quote)
        pieces[1::2] = map(json.dumps, pieces[1::2])
        pieces[::2] = [re.sub(r'([{,])\s*([^\s"{}\[\],:]+)\s*:', r'\1"\2":', piece) for piece in pieces[::2]]
        return "".join(pieces)


@dataclass(frozen=True)
class MarkedCalls(CallForm):
    """Calls whose name and arguments stand between marks. Strings are written as they are, other values as JSON.

    ``closes_bare`` closes a call without arguments; ``key`` stands before the first key, ``value`` before a value,
    ``again`` between a value and the next key, and ``closes`` behind the last value.
    """

    closes_bare: str
    key: str
    value: str
    again: str
    closes: str

    def read(self, text: str) -> tuple[str, list[Call]]:
        opens = _pattern(self.opens.strip())
        match = opens.search(text)
        before = text[: match.start()] if match else text
        calls: list[Call] = []
        while match:
            name, mark, position = _up_to(text, match.end(), self.closes_bare, self.key)
            arguments: dict[str, object] = {}
            while mark in (self.key, self.again):
                key, _, position = _up_to(text, position, self.value)
                value, mark, position = _up_to(text, position, self.closes, self.again)
                arguments[key] = _value(value)
            calls.append((name.strip(), arguments))
            match = re.compile(rf"\s*{opens.pattern}").match(text, position)
        return before, calls


def _up_to(text: str, position: int, *marks: str) -> tuple[str, str, int]:
    """Return the text from ``position`` to the next of ``marks``, the mark found, and the position after that mark."""
    places = [(match.start(), match.end(), mark) for mark in marks if (match := _pattern(mark).search(text, position))]
    if not places:
        raise ValueError(f"nothing like {' or '.join(map(repr, marks))} behind {text[:position][-60:]!r}")
    start, end, mark = min(places)
    return text[position:start], mark, end


def _pattern(mark: str) -> re.Pattern[str]:
    """Return a regular expression that matches ``mark`` with or without its white space."""
    return re.compile("".join(f"{re.escape(letter)}{'?' if letter.isspace() else ''}" for letter in mark))


def _value(text: str) -> object:
    """Return the value of an argument: parsed if it is JSON, else the text itself."""
    with suppress(ValueError):
        return STRICT_JSON.decode(text)
    return text


def learn_form(write: Callable[..., str]) -> CallForm:
    """Return the form of a template's calls.

    Args:
        write: returns the turn that makes the given calls, from the end of its prompt to its closing control token.

    Raises:
        ValueError: the calls have an unknown form, or reading a written call gives another call.
    """
    form = _learned_objects(write) or _learned_names(write)
    for call in (CALLED, _ODD):
        if form.read(write(call))[1] != [(call.name, call.arguments)]:
            raise ValueError(f"a call is not read as it is written: {write(call)[:60]!r}")
    return form


def _learned_objects(write: Callable[..., str]) -> ObjectCalls | None:
    turn = write(CALLED)
    objects = list(_objects(turn))
    if len(objects) != 1:
        return None
    [(start, _, name, arguments)] = objects
    between = ""
    with suppress(ValueError):  # it makes one call in a turn
        two = write(CALLED, CALLED)
        first, second = _objects(two)
        between = two[first[1] : second[0]]
    return ObjectCalls(turn[:start], between, name, arguments)


def _objects(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield start, end, name's key and arguments' key of each JSON object that writes the call :data:`CALLED`."""
    position = text.find("{")
    while position >= 0:
        try:
            written, end = json.JSONDecoder().raw_decode(text, position)
        except ValueError:
            return
        name = next((key for key, value in written.items() if value == CALLED.name), None)
        wanted = (CALLED.arguments, json.dumps(CALLED.arguments))
        arguments = next((key for key, value in written.items() if value in wanted), None)
        if name is not None and arguments is not None:
            yield position, end, name, arguments
        position = text.find("{", end)


def _learned_names(write: Callable[..., str]) -> NamedCalls | MarkedCalls:
    opens, key, value, again, _, closes = _around(write(_SEVERAL), "qwname", "qwkey", "qwvalue", "qwlast", "qwend")
    *_, closes_bare = _around(write(_BARE), "qwname")
    *_, value_of_number, closes_number = _around(write(_NUMBER), "qwname", "qwkey", "70707")
    if value == value_of_number:
        return MarkedCalls(opens, closes_bare, key, value, again, closes)
    before, brace, _ = key.partition("{")
    if not brace:
        raise ValueError(f"a call is not a JSON object, a name and an object, or text between marks: {opens!r}")
    return NamedCalls(opens, before, closes.removesuffix(closes_number), closes_number.partition("}")[2])


def _around(text: str, *words: str) -> list[str]:
    """Return the pieces of ``text`` before, between and after ``words``. Each word must be in ``text`` once."""
    pieces = []
    for word in words:
        before, match, text = text.partition(word)
        if not match or word in text:
            raise ValueError(f"a call does not say {word!r} once")
        pieces.append(before)
    return [*pieces, text]


def rendered_call(name: object, arguments: object, raw: str) -> str:
    """Return a call of the policy in the form that environments read, or its ``raw`` text as an unread call."""
    if isinstance(name, str) and isinstance(arguments, dict):
        return printable(render_tool_call(ToolCall(name, arguments)))  # JSON can spell a lone surrogate
    return unread_call(raw)


def unread_call(text: str) -> str:
    """Return text that is not a valid call in a form that makes environments report it as unreadable."""
    return f"{CALL_OPENS}\n{text}\n{CALL_CLOSES}"
