"""``@tool``: schema from signature and docstring, checks of arguments, results."""

import asyncio
import enum
import math
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic.dataclasses import dataclass

from agent_environments.tools import tool
from agent_environments.tools.tool import WrongArguments
from loop_plumbing.deadline import DeadlinePassed, Raised
from support.texts import texts_beside

TABLES = texts_beside(__file__)


@pytest.fixture(autouse=True)
def in_a_tool_process(alarm):
    """Functions run here, as they do there."""


class Point(BaseModel):
    x: float
    y: float


class Colour(enum.Enum):
    RED = "red"


@tool
def draw(points: list[Point], style: Literal["line", "dots"] = "line", schema: str | None = None) -> str:
    """Draw a picture.

    What is drawn last lies on top.

    Args:
        points: where to.
        schema: may have any name.
    """
    return f"{points[0].x} {style} {schema}"


def test_the_schema_says_what_signature_and_docstring_say():
    function = draw.schema["function"]
    assert draw.schema["type"] == "function"
    assert function["name"] == "draw"
    assert function["description"] == "Draw a picture.\n\nWhat is drawn last lies on top."
    properties = function["parameters"]["properties"]
    assert function["parameters"]["required"] == ["points"]
    assert properties["points"]["description"] == "where to."
    assert properties["style"] == {"default": "line", "enum": ["line", "dots"], "type": "string"}
    assert list(properties) == ["points", "style", "schema"]


def test_arguments_come_as_the_hints_say():
    arguments = {"points": [{"x": 1, "y": 2}]}
    assert draw.check(arguments) == {"points": [Point(x=1.0, y=2.0)]}
    assert draw.run(arguments, None) == "1.0 line None"


@pytest.mark.parametrize(("arguments", "complaint"), TABLES["wrong_arguments_are_named"])
def test_wrong_arguments_are_named(arguments, complaint):
    with pytest.raises(WrongArguments, match=complaint):
        draw.check(arguments)


class Reach(BaseModel):
    low: float
    high: float = math.inf


@tool
def answer(one: float, other: float | str = 0, many: dict[str, list[float]] | None = None, any_: Any = math.inf):
    """Answer."""


@dataclass
class Way:
    low: float
    high: float = math.inf


@tool
def reach(at: list[Reach], most: float = math.inf, by: Way | None = None):
    """Reach."""


@pytest.mark.fault("an answer of infinity or NaN that the reward took for close to any target")
@pytest.mark.parametrize("number", ["inf", "nan", "-Infinity", math.nan, -math.inf])
def test_an_argument_is_a_finite_number(number):
    given = [{"one": number}, {"one": 0, "many": {"a": [1, number]}}, {"at": [{"low": 1, "high": number}]}]
    given += [{"at": [], "by": {"low": number}}, {"at": [], "by": {"low": 1, "high": -math.inf}}]
    given += [{"one": 0, "any_": {"a": [number]}}] if isinstance(number, float) else []
    for arguments in given:
        with pytest.raises(WrongArguments, match="Input should be a finite number"):
            (reach if "at" in arguments else answer).check(arguments)
    assert answer.check({"one": 1, "other": "inf"}) == {"one": 1.0, "other": "inf"}
    assert reach.check({"at": [{"low": 1}], "by": {"low": 2}}) == {"at": [Reach(low=1.0)], "by": Way(low=2.0)}


def test_a_tool_is_still_the_function():
    assert draw([Point(x=1, y=2)], "dots") == "1.0 dots None"
    assert draw.__name__ == "draw"


def test_a_method_is_stateful_and_can_be_called():
    class Light:
        colour = Colour.RED

        @tool(name="set_colour", description="Set it.")
        def set(self, colour: Colour) -> str:
            self.colour = colour
            return colour.value

    assert Light.set.stateful
    assert Light.set.parameters["properties"].keys() == {"colour"}
    assert Light.set.name == "set_colour"
    assert Light().set(Colour.RED) == "red"


def test_a_tool_without_parameters():
    @tool
    def look():
        """Look."""

    assert look.parameters == {"type": "object", "properties": {}}
    assert look.check({}) == {}


@pytest.mark.parametrize(("body", "options", "kind", "words"), TABLES["errors_of_the_function_are_the_tools"].values())
def test_errors_of_the_function_are_the_tools(body, options, kind, words):
    names = {"asyncio": asyncio}
    exec(f'async def work():\n    "Work."\n    {body}', names)
    with pytest.raises(Raised if kind == "Raised" else DeadlinePassed, match=words):
        tool(**options)(names["work"]).run({}, None)


def unhinted(a):
    """A."""


def anything(*a: int):
    """A."""


def unknown(a: "Nowhere"):  # noqa: F821
    """A."""


def unsayable(a: Ellipsis):
    """A."""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (unhinted, "tool unhinted: parameter a needs a type hint"),
        (anything, r"tool anything: parameter \*a: int must be one that can be passed by name"),
        (unknown, "tool unknown: its type hints cannot be read: name 'Nowhere'"),
        (unsayable, "tool unsayable: "),
    ],
)
def test_signatures_that_cannot_be_said_are_refused(function, complaint):
    with pytest.raises(ValueError, match=complaint):
        _ = tool(function).schema
