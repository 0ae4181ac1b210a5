"""The import directions in .importlinter hold."""

from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports


def test_imports_go_one_way(capsys):
    config = Path(__file__).parents[1] / ".importlinter"
    status = lint_imports(str(config), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out
