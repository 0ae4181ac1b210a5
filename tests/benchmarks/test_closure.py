"""benchmarks/closure.py on a small tree: which imports count, and what leads nowhere."""

import sys

import pytest

from benchmarks import closure
from loop_recipes.cli import VERBS
from support.texts import texts_beside

TABLES = texts_beside(__file__)

FILES = TABLES["files"]


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_count_wherever_they_stand_and_names_in_strings_but_not_what_is_for_types(tree, monkeypatch):
    source = closure.Source(tree)
    own = ["one", "one.by_string", "one.hook", "one.inner", "one.inner.beside", "one.inner.deep", "one.later"]
    assert source.closure(["run"]) == [*own, "one.names", "one.untyped", "run", "two"]
    assert source.closure(["config.yaml"]) == ["two"]
    assert source.lines("one.names") == 2
    assert "tests" not in source.files
    assert "one.typed" in source.imports("one.later", types=True)
    monkeypatch.setattr(closure, "CHOICES", {"one.untyped"})
    assert "one.by_string" not in closure.Source(tree).closure(["run"])
    monkeypatch.setattr(closure, "ASKED_FOR", {"one.later", "one.names"})
    assert closure.Source(tree).closure(["run"]) == ["one", *own[3:6], "one.names", "run", "two"]


@pytest.mark.parametrize(("file", "text", "error"), TABLES["what_leads_nowhere_is_named"])
def test_what_leads_nowhere_is_named(tree, file, text, error):
    (tree / file).unlink() if text is None else (tree / file).write_text(text)
    with pytest.raises(closure.Unresolved, match=error):
        closure.Source(tree).closure(["run", "config.yaml"])


def test_every_way_in_leads_somewhere(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["closure.py"])
    assert closure.main() == 0
    rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:]]
    source = closure.Source(closure.ROOT)
    assert [row[0] for row in rows] == [*closure.ways_in(source), "all packages"]
    lines = {way: int(count.replace(",", "")) for way, _, count in rows}
    assert lines["tune run loop_appworld"] < lines[closure.OWN_TASK] < lines["every verb for FILE.py"]
    assert source.verbs().keys() == VERBS.keys()
    assert source.files.keys() >= closure.CHOICES | closure.ASKED_FOR, "one that has moved would be counted"
