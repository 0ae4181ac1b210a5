"""benchmarks/configs.py names the first key that two checkouts compose otherwise, by the names that keys have today."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "configs.py"
BEFORE = {"seed": 1, "update.epochs": 2, "run": "${update.epochs} of ${oc.env:X}", "node": {}}


@pytest.fixture
def configs(monkeypatch):
    spec = importlib.util.spec_from_file_location("configs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RENAMED", {"update": "learning"})
    return module


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({"seed": 1, "learning.epochs": 2, "run": "${learning.epochs} of ${oc.env:X}", "node": {}}, None),
        ({"learning.epochs": 2, "seed": 1, "run": "${learning.epochs} of ${oc.env:X}", "node": {}}, None),
        ({"seed": 1, "learning.epochs": 3, "run": "${learning.epochs} of ${oc.env:X}"}, "learning.epochs: 2 -> 3"),
        ({"seed": 1, "learning.epochs": 2, "run": "${update.epochs} of ${oc.env:X}"}, "run: "),
        ({"seed": 1, "learning.epochs": 2, "run": "${learning.epochs} of ${oc.env:X}"}, "node is only in BASE"),
        (
            {"node": {}, "seed": 1, "learning.epochs": 2, "run": "${learning.epochs} of ${oc.env:X}"},
            "the order of keys, at node",
        ),
        ("no such key", "'composed' -> 'no such key'"),
    ],
)
def test_the_first_difference_is_named(configs, now, difference):
    found = configs.difference(configs.renamed(BEFORE), now)
    assert found == difference or found.startswith(difference)


def test_a_row_counts_what_is_equal_and_what_is_on_one_side_only(configs, capsys):
    before = [["r", "machine", "a", {"seed": 1}], ["r", "machine", "b", "refused"], ["r", "machine", "c", {}]]
    now = [["r", "machine", "a", {"seed": 1}], ["r", "machine", "b", "refused"], ["r", "machine", "d", {}]]
    [row] = configs.compared(before, now)
    assert (row["composed"], row["refused"], row["equal"]) == (2, 1, 2)
    assert row["differ"] == {"d": "is only in this checkout", "c": "is only in BASE"}
    assert (configs.show([row]), configs.show([row | {"differ": {}}])) == (1, 0)
    assert "d: is only in this checkout" in capsys.readouterr().out
