"""A run records each start, and a later one takes nothing of an earlier one away."""

import json
import sys
from importlib.metadata import version

from loop_recipes.run import starts


def test_each_start_is_a_line_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "tune", "run", "x"])
    starts.record_start(tmp_path, 0, {"seed": 1})
    starts.record_start(tmp_path, 4, {"seed": 2})
    first, second = (json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (first["after_iteration"], second["after_iteration"]) == (0, 4)
    assert (first["config"], second["config"]) == ({"seed": 1}, {"seed": 2})
    assert first["command"] == ["python", "tune", "run", "x"]
    assert first["packages"]["torch"] == version("torch")
    assert first["machine"]["cores"] >= 1
    assert first["at"] <= second["at"]


def test_the_code_of_a_checkout_is_named_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(starts, "loop_package", lambda name: tmp_path / "recipes/loop_recipes")
    assert starts.code_version() is None
    (tmp_path / ".git").mkdir()  # no repository: git refuses it
    assert starts.code_version() is None
