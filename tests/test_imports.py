"""The import directions in .importlinter hold."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.closure import SCORED, Source, ways_in


def test_imports_go_one_way():
    """In a process of its own: import-linter switches off the loggers of the one that it runs in."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


ROOT = Path(__file__).parents[1]


def test_no_test_of_the_core_names_contrib():
    """The core is tested where contrib is not installed, so contrib's tests lie in its own folder."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    assert len(files) > 300
    assert [str(file.relative_to(ROOT)) for file in files if "loop_contrib" in file.read_text(encoding="utf-8")] == []


def test_a_score_of_a_task_of_ones_own_imports_no_appworld():
    source = Source(ROOT)
    loaded = source.closure(ways_in(source)[SCORED])
    assert [module for module in loaded if module.startswith("appworld_adapter")] == []


@pytest.mark.fault("an installed wheel lacks a package")
def test_every_package_is_in_the_wheel():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed, missing = set(setuptools["packages"]), []
    for top in {package.partition(".")[0] for package in listed}:
        folder = ROOT / setuptools["package-dir"].get(top, top)
        for file in folder.rglob("__init__.py"):
            package = ".".join([top, *file.parent.relative_to(folder).parts])
            if "tests" not in file.parent.relative_to(folder).parts and package not in listed:
                missing.append(package)
    assert missing == []
