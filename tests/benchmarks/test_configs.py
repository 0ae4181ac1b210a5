"""benchmarks/configs.py names the first key that two checkouts compose otherwise, by the names that keys have today."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "configs.py"
BEFORE = {"seed": 1, "update.epochs": 2, "run": "${update.epochs} of ${oc.env:X}"}
RUN = "${learning.epochs} of ${oc.env:X}"


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({"learning.epochs": 2, "seed": 1, "run": RUN}, None),
        ({"seed": 1, "learning.epochs": 3, "run": RUN}, "learning.epochs: 2 -> 3"),
        ({"learning.epochs": 2, "run": RUN}, "seed is only in BASE"),
        ({"run": RUN, "seed": 1, "learning.epochs": 2}, "the order of keys, at run"),
        ("no such key", "'composed' -> 'no such key'"),
    ],
)
def test_the_first_difference_is_named(monkeypatch, now, difference):
    spec = importlib.util.spec_from_file_location("configs", SCRIPT)
    configs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(configs)
    monkeypatch.setattr(configs, "RENAMED", {"update": "learning"})
    rows = configs.compared([["r", "machine", "a", BEFORE]], [["r", "machine", "a", now]])
    assert rows[0]["differ"] == ({} if difference is None else {"a": difference})
    assert configs.show(rows) == (difference is not None)
