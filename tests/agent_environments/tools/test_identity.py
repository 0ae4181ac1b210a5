"""What a score rests on: the code and the tasks."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from agent_environments.tools.identity import code_digest, identity, plain, tasks_digest
from support.texts import texts_beside

TABLES = texts_beside(__file__)

FILE = TABLES["file"]
FILES = {
    "tasks.py": FILE,
    "helper.py": "def lowered(text):\n    from deep import strip\n    return strip(text.lower())\n",
    "deep.py": "def strip(text):\n    return text.strip()\n",
    "parts/__init__.py": "",
    "parts/rules.py": "from . import more\nstrict = more.STRICT\n",
    "parts/more.py": "STRICT = True\n",
    "other.py": "raise SystemExit\n",
}


def written(folder, **changed):
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(changed.get(name, text))
    return str(folder / "tasks.py")


@pytest.mark.parametrize(
    ("name", "before", "after", "same"), TABLES["the_code_is_the_file_and_what_it_imports_from_its_folder"]
)
def test_the_code_is_the_file_and_what_it_imports_from_its_folder(tmp_path, name, before, after, same):
    first = code_digest(written(tmp_path / "a"))
    assert before in FILES[name]
    second = code_digest(written(tmp_path / "b", **{name: FILES[name].replace(before, after, 1)}))
    assert (first == second) is same


def test_a_module_by_its_dotted_name_is_the_same_wherever_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path / "identified")
    (tmp_path / "identified/tasks.py").write_text("from identified import deep\n")
    (tmp_path / "identified/__init__.py").touch()
    before = code_digest("identified.tasks")
    (tmp_path / "identified/deep.py").write_text("changed = 1\n")
    assert code_digest("identified.tasks") != before
    assert code_digest("numpy.version") == code_digest("numpy.version")
    with pytest.raises(ValueError, match="no_such_module"):
        code_digest("no_such_module.tasks")


class Color(Enum):
    RED = 1


@dataclass
class Point:
    x: int


class Own:
    def __init__(self, inside):
        self.inside = inside


def judged():
    pass


EQUAL = [
    lambda: {"a", "b", "c"},
    lambda: {"b": 1, "a": {2: {3}}},
    lambda: np.arange(3),
    lambda: np.float32(0.1),
    lambda: [Color.RED, Point(3), date(2026, 1, 2), Path("a")],
    lambda: Own([1, {"x"}]),
    lambda: judged,
    lambda: float("nan"),
    lambda: b"\xff",
    lambda: "\ud800",
]


@pytest.mark.parametrize("number", range(len(EQUAL)))
def test_values_that_are_equal_are_equal_in_every_process(number, tmp_path):
    """Whatever a field holds, and however its hash falls."""
    program = (
        f"import sys; from {__name__} import EQUAL, tasks_digest; print(tasks_digest([{{'x': EQUAL[{number}]()}}]))"
    )
    here = tasks_digest([{"x": EQUAL[number]()}])
    others = [tasks_digest([{"x": EQUAL[other]()}]) for other in range(len(EQUAL)) if other != number]
    assert here not in others
    assert json.loads(json.dumps(plain(EQUAL[number](), ()))) == plain(EQUAL[number](), ())
    if number in (0, 5):  # those in whose order or address two processes differ
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        variables = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
        said = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
        )
        assert said.stdout.strip() == here


def test_an_object_that_holds_itself_ends():
    loop: list = [1]
    loop.append(loop)
    assert plain(loop, ()) == [1, ["builtins.list", "..."]]


def test_the_order_of_tasks_is_no_part_of_them_and_each_field_is(tmp_path):
    tasks = [{"id": "a", "question": "?", "target": 1}, {"id": "b", "question": "?", "target": 2}]
    file = written(tmp_path)
    assert identity(file, tasks) == identity(file, tasks[::-1])
    assert identity(file, tasks)["tasks"] != identity(file, [tasks[0], {**tasks[1], "target": 2.0}])["tasks"]


@pytest.mark.fault("the same file, model, adapter or run in another place is taken for another")
@pytest.mark.parametrize("kind", [str, Path])
def test_a_task_that_names_a_file_beside_the_module_is_the_same_elsewhere(tmp_path, kind):
    def found(folder, name="data.csv"):
        file = written(tmp_path / folder)
        return identity(
            file, [{"id": "a", "question": f"Read {Path(file).parent}/x", "file": kind(Path(file).parent / name)}]
        )

    assert found("one") == found("two")
    assert found("one") != found("two", "other.csv")
