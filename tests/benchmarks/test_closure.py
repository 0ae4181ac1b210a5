"""benchmarks/closure.py on a small tree: which imports count, and what leads nowhere."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "closure.py"
FILES = {
    "one/__init__.py": "from one.names import NAME\n",
    "one/names.py": "NAME = 1\n\n",
    "one/inner/__init__.py": "",
    "one/inner/deep.py": "from ..names import NAME\nfrom . import beside\nimport json\n",
    "one/inner/beside.py": "def late():\n    from one import later\n",
    "one/later.py": "if TYPE_CHECKING:\n    import one.typed\nelse:\n    import one.untyped\n",
    "one/typed.py": "x = 1\n",
    "one/untyped.py": "x = 'one.by_string'\n",
    "one/by_string.py": "x = 1\n",
    "recipes/two/__init__.py": "",
    "recipes/run.py": "from two import nothing\nimport one.inner.deep as deep\n",
    "tests/__init__.py": "",
}


@pytest.fixture(scope="module")
def closure():
    spec = importlib.util.spec_from_file_location("closure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_count_wherever_they_stand_but_not_those_for_types_or_by_string(closure, tree):
    source = closure.Source(tree)
    loaded = source.closure(["run"])
    own = ["one", "one.inner", "one.inner.beside", "one.inner.deep", "one.later", "one.names", "one.untyped"]
    assert loaded == [*own, "run", "two"]
    assert source.lines("one.names") == 2
    assert "tests" not in source.files


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("recipes/run.py", "import one.gone\n", "run names one.gone, which is no module"),
        ("one/names.py", "from one.gone import x\n", "one.names names one.gone, which is no module"),
        ("recipes/run.py", None, "a way in names run, which is no module"),
    ],
)
def test_what_leads_nowhere_is_named(closure, tree, file, text, error):
    (tree / file).unlink() if text is None else (tree / file).write_text(text)
    with pytest.raises(closure.Unresolved, match=error):
        closure.Source(tree).closure(["run"])


def test_every_way_in_leads_somewhere(closure, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["closure.py"])
    assert closure.main() == 0
    rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == [*closure.WAYS, "all packages"]
    lines = {way: int(count.replace(",", "")) for way, _, count in rows}
    assert lines["tune run loop_appworld"] < lines["loop train FILE.py"] < lines["every verb for FILE.py"]
