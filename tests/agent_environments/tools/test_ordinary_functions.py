"""Functions as people write them: what they return, how they say their arguments, what they are, what they import."""

import functools
import sys
import uuid
from collections import Counter, namedtuple
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum, StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Optional

import numpy as np
import pytest
import torch
from pydantic import BaseModel, Field

from agent_environments.protocol import Grade
from agent_environments.tools import own_folder, reply, reward, tool
from agent_environments.tools.forked import ToolCalls
from agent_environments.tools.module import load_module
from agent_environments.tools.reward import together
from agent_environments.tools.tool import WrongArguments, as_text
from support.texts import texts_beside

TABLES = texts_beside(__file__)


class Color(Enum):
    RED = "red"


class Size(StrEnum):
    SMALL = "small"


@dataclass
class Point:
    x: int
    y: Any = None


class Model(BaseModel):
    when: date


Pair = namedtuple("Pair", "a b")


class Silent:
    pass


@pytest.mark.fault("what a tool returns")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.float64(0.1), "0.1"),
        (np.array([[1, 2], [3, 4]]), "[[1,2],[3,4]]"),
        (np.array(5), "5"),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (torch.tensor(3), "3"),
        (torch.tensor([1.5], requires_grad=True), "[1.5]"),
        (torch.tensor(1.0, dtype=torch.bfloat16), "1.0"),
        (Decimal("1.10"), "1.1"),
        (Decimal(3), "3"),
        (Fraction(1, 3), "1/3"),
        (Color.RED, "red"),
        (Size.SMALL, "small"),
        (Point(1, np.int64(2)), '{"x":1,"y":2}'),
        (Model(when=date(2026, 1, 2)), '{"when":"2026-01-02"}'),
        ({"pear", "apple"}, '["apple","pear"]'),
        ({3, 10, 2}, "[2,3,10]"),
        ({1, "a"}, """["a",1]"""),
        (date(2026, 1, 2), "2026-01-02"),
        (Path("a/b"), "a/b"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({"path": Path("x"), np.int64(2): [np.bool_(False)]}, '{"path":"x","2":[false]}'),
        ({(1, 2): Color.RED}, '{"1,2":"red"}'),
        (Counter("aab"), '{"a":2,"b":1}'),
        (Pair(1, 2), "[1,2]"),
        ((each for each in (1, 2)), "[1,2]"),
        (range(3), "[0,1,2]"),
        (b"bytes", "bytes"),
        ("3", "3"),
        ('"quoted"', '"quoted"'),
        (None, "done"),
    ],
)
def test_a_result_is_read_as_a_person_would_say_it(value, text):
    assert as_text(value) == text


@pytest.mark.fault("what a tool returns")
@pytest.mark.parametrize("value", [Silent(), [Silent()], {"a": Silent()}, b"\xff"])
def test_a_result_that_nobody_can_read_is_an_error_and_no_address(value):
    with pytest.raises(ValueError, match=r"no text of its own|utf-8"):
        as_text(value)


@pytest.mark.fault("numbers of other packages as a reward")
@pytest.mark.parametrize(
    ("value", "worth"),
    [
        (np.bool_(True), 1.0),
        (np.float32(0.25), 0.25),
        (np.array([0.5]), 0.5),
        (torch.tensor(True), 1.0),
        (torch.tensor([0.5]), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (np.int8(1), 1.0),
    ],
)
def test_a_reward_may_be_a_number_of_any_package(alarm, value, worth):
    one = reward(lambda: value)
    assert together([(one, one.grade({}))]) == Grade(worth, worth == 1.0)


@pytest.mark.parametrize("value", [np.array([0.5, 0.5]), torch.zeros(2), np.float32("nan"), Decimal(2), "1"])
def test_a_reward_that_is_several_numbers_or_none_is_refused(alarm, value):
    with pytest.raises(ValueError, match="which is not a number"):
        reward(lambda: value).grade({})


def schema(function):
    return tool(function).parameters["properties"]


@pytest.mark.fault("pydantic's Field as a default")
def test_fields_of_pydantic_are_defaults_bounds_and_descriptions(alarm):
    def order(
        count: int = Field(3, ge=1, description="How many."),
        what: str = Field(description="The fruit."),
        places: list[str] = Field(default_factory=list),  # noqa: B008
    ) -> str:
        """Order fruit.

        Args:
            count: not this.
            places: Where to.
        """
        return f"{count} {what} {places}"

    one = tool(order)
    assert one.parameters["required"] == ["what"]
    assert schema(order)["count"] == {"default": 3, "description": "How many.", "minimum": 1, "type": "integer"}
    assert schema(order)["places"]["description"] == "Where to."
    assert one.run({"what": "pear"}, None) == "3 pear []"
    assert one.run({"what": "pear", "count": 4, "places": ["a"]}, None) == "4 pear ['a']"
    with pytest.raises(WrongArguments, match="count: Input should be greater than or equal to 1"):
        one.run({"what": "pear", "count": 0}, None)


class Documented:
    """As typing_extensions.Doc, which pydantic's users know."""

    def __init__(self, documentation):
        self.documentation = documentation


GOOGLE = "Do.\n\nArgs:\n    x: The x.\n\n    y: The x.\n\n{}\n\nReturns:\n    A number.\n"
NUMPY = "Do.\n\nParameters\n----------\nx, y : int\n    The x.\n\nReturns\n-------\nint\n\n{}\n"
SPHINX = "Do.\n\n:param x: The x.\n:param y:\n    The x.\n:return: A number.\n\n{}\n"


@pytest.mark.fault("a part of a docstring that the policy was not told")
@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, SPHINX, SPHINX.replace("\n:", "\n@")])
@pytest.mark.parametrize("text", ["It ends: be sure.", "Note:\n    It rounds.", "Notes\n-----\nIt rounds.\n\nTwice."])
def test_all_of_a_docstring_is_told_but_results(docstring, text):
    def move(x: int, y: int): ...

    move.__doc__ = docstring.format(text)
    assert tool(move).description == f"Do.\n\n{text}"
    assert [part["description"] for part in schema(move).values()] == ["The x."] * 2


@pytest.mark.fault("descriptions in annotations")
def test_annotations_say_what_an_argument_is(alarm):
    def search(
        a: Annotated[int, Field(description="By field.", le=5)],
        b: Annotated[str, "By a text."] = "k",
        c: Annotated[int, Documented("By Doc.")] = 1,
        d: Annotated[int, Field(default=4)] = Field(2, description="By default."),
        e: Annotated[int, Field(default=7)] = 8,
        f: Optional[Annotated[int, Field(description="Deep.")]] = None,  # noqa: UP045
        g: int = 0,
    ) -> list:
        """Search.

        Args:
            a: not this.
            e: By docstring.
        """
        return [a, b, c, d, e, f, g]

    said = {name: part.get("description") for name, part in schema(search).items()}
    assert said == {
        "a": "By field.",
        "b": "By a text.",
        "c": "By Doc.",
        "d": "By default.",
        "e": "By docstring.",
        "f": None,
        "g": None,
    }
    assert schema(search)["f"]["anyOf"][0]["description"] == "Deep."
    assert tool(search).run({"a": 1}, None) == '[1,"k",1,2,8,null,0]'
    with pytest.raises(WrongArguments, match="a: Input should be less than or equal to 5"):
        tool(search).check({"a": 6})


@pytest.mark.fault("descriptions in annotations")
def test_an_alias_is_what_the_agent_writes(alarm):
    def look(y: Annotated[int, Field(default=4)], x: int = Field(alias="x-position")) -> int:
        """Look."""
        return x + y

    assert list(schema(look)) == ["y", "x-position"]
    assert tool(look).run({"x-position": 1}, None) == "5"


def double(a: int, factor: int = 2) -> int:
    """Double a number."""
    return a * factor


class Adder:
    """Add two numbers."""

    def __call__(self, a: int, b: int = 2) -> int:
        return a + b


def timed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Box:
    @tool
    @staticmethod
    def inner(a: int) -> int:
        """Add one."""
        return a + 1

    @staticmethod
    @tool
    def outer(a: int) -> int:
        """Add two."""
        return a + 2

    @tool
    @timed
    def method(self, a: int) -> int:
        """Add three."""
        return a + 3

    @tool
    @functools.lru_cache  # noqa: B019
    def kept(self, a: int) -> int:
        """Add four."""
        return a + 4


async def later(a: int) -> int:
    """Come later."""
    return a


@pytest.mark.fault("callables that are no plain functions")
@pytest.mark.parametrize(
    ("function", "name", "description", "arguments", "text"),
    [
        (functools.partial(double, factor=3), "double", "Double a number.", ["a"], "15"),
        (functools.partial(functools.partial(double), 4), "double", "Double a number.", ["factor"], "20"),
        (functools.partial(later), "later", "Come later.", ["a"], "5"),
        (functools.lru_cache(double), "double", "Double a number.", ["a", "factor"], "10"),
        (timed(double), "double", "Double a number.", ["a", "factor"], "10"),
        (Adder(), "Adder", "Add two numbers.", ["a", "b"], "7"),
        (Adder().__call__, "__call__", None, ["a", "b"], "7"),
        (later, "later", "Come later.", ["a"], "5"),
    ],
)
def test_anything_that_can_be_called_is_a_tool(alarm, function, name, description, arguments, text):
    one = tool(description=description or "It.")(function) if description is None else tool(function)
    assert (one.name, one.description) == (name, description or "It.")
    assert list(one.parameters["properties"]) == arguments
    assert one.run({arguments[0]: 5}, None) == text
    assert not one.stateful


@pytest.mark.fault("callables that are no plain functions")
def test_static_methods_and_decorated_methods_are_tools(alarm):
    from agent_environments.tools.module import _methods

    assert [one.name for one in _methods(Box)] == ["inner", "outer", "method", "kept"]
    assert [one.stateful for one in _methods(Box)] == [False, False, True, True]
    box = Box()
    assert [one.run({"a": 1}, box) for one in _methods(Box)] == ["2", "3", "4", "5"]
    assert (box.inner(1), box.outer(1), box.method(1), Box.inner(1)) == (2, 3, 4, 2)


@pytest.mark.fault("callables that are no plain functions")
def test_rewards_and_replies_may_be_partials_and_objects(alarm):
    one = reward(functools.partial(lambda answer, target, slack: abs(answer - target) <= slack, slack=1))
    assert one.name == "<lambda>"
    assert one.grade({"target": 3}, answer=4).success
    one.check_task({"target": 3})

    class Echo:
        def __call__(self, text):
            return text * 2

    assert reply(Echo()).run("a", None) == "aa"
    assert reply(Echo()).name == "Echo"


@pytest.mark.fault("callables that are no plain functions")
@pytest.mark.parametrize("wrong", [Silent, 3, "f", property(double)])
def test_what_is_no_function_is_one_line(wrong):
    with pytest.raises(ValueError, match="is not a function"):
        tool(wrong)


def test_a_function_that_yields_asynchronously_is_one_line():
    async def lines(a: int):
        """Give lines."""
        yield a

    with pytest.raises(ValueError, match="lines yields; let it return its result whole"):
        tool(lines)


@pytest.mark.fault("docstrings of odd text")
@pytest.mark.parametrize(("doc", "description"), TABLES["a_docstring_of_odd_text_loses_nothing"])
def test_a_docstring_of_odd_text_loses_nothing(doc, description):
    def odd(a: int):
        return a

    odd.__doc__ = doc
    assert tool(odd).description == description


FILE = TABLES["file"]
FOLDER = {
    "mine.py": FILE,
    "helper.py": "from __future__ import annotations\nfrom pydantic import BaseModel\n"
    "class Pair(BaseModel):\n    a: int\ndef same(a, b): return a == b\n",
    "lib/deep.py": "DEEP = 'deep'\n",
    "only_later.py": "TEXT = 'later'\n",
    "email.py": "raise SystemError('this is no module of the standard library')\n",
    "yaml/readme.txt": "A folder that has the name of an installed package.",
}


@pytest.fixture
def neighbours(tmp_path, monkeypatch):
    for name, text in FOLDER.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(own_folder.FOLDER, "")
    yield tmp_path
    for name in ("helper", "lib", "lib.deep", "only_later"):
        sys.modules.pop(name, None)


@pytest.mark.fault("a neighbour's import")
def test_a_file_imports_its_neighbours_and_nobody_else_does(neighbours, tmp_path_factory):
    before = set(sys.modules)
    module = load_module(str(neighbours / "mine.py"))
    assert module.tasks["task1"]["question"] == "deep"
    assert module.tools["late"].schema["function"]["parameters"]["$defs"]["Pair"]["required"] == ["a"]
    own = f"{own_folder.__name__}.mine"
    assert set(sys.modules) - before <= {own} | {name for name in sys.modules if "email" in name}
    other = tmp_path_factory.mktemp("other")
    (other / "helper.py").write_text("same = 'another'\n")
    theirs = FILE.replace("from __future__ import annotations", "import yaml; assert yaml.safe_load")
    (other / "theirs.py").write_text(theirs)
    with pytest.raises(ValueError, match=r"cannot import name 'Pair' from 'helper' \(.*other"):
        load_module(str(other / "theirs.py"))
    with pytest.raises(ModuleNotFoundError):
        import helper  # noqa: F401


def test_a_process_of_one_file_finds_its_neighbours_in_calls_too(neighbours, alarm):
    module = load_module(str(neighbours / "mine.py"), alone=True)
    assert module.tools["late"].run({"pair": {"a": 3}}, None) == "later3"


def test_what_a_reset_shows_is_read_as_a_result_is(tmp_path, alarm):
    file = tmp_path / "house.py"
    file.write_text(
        "from agent_environments.tools import reply, reward\n"
        "class House:\n"
        "    def reset(self, task): return {'lights': {True, False}} if task['id'] == 'a' else None\n"
        "    @reply\n"
        "    def say(self, text): ...\n"
        "@reward\n"
        "def right(instance): return True\n"
        "TASKS = [{'id': 'a'}, {'id': 'b'}]\n"
    )
    calls = ToolCalls(load_module(str(file)), 10.0)
    calls.make()
    assert [calls.reset(task) for task in "ab"] == ['{"lights":[false,true]}', ""]


@pytest.mark.parametrize("hint", [..., 3, "3", "no such name", [1]])
def test_a_hint_that_is_no_type_is_one_line(hint):
    def odd(a):
        """Odd."""

    odd.__annotations__ = {"a": hint}
    with pytest.raises(ValueError, match=r"^tool odd: ") as told:
        _ = tool(odd).schema
    assert "\n" not in str(told.value)
