"""The import directions in .importlinter hold."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def test_imports_go_one_way():
    """In a process of its own: import-linter switches off the loggers of the one that it runs in."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


ROOT = Path(__file__).parents[1]


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


def test_no_test_of_the_core_names_contrib():
    """The core is tested where contrib is not installed, so contrib's tests lie in its own folder."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    assert len(files) > 300
    assert [str(file.relative_to(ROOT)) for file in files if "loop_contrib" in file.read_text(encoding="utf-8")] == []


NAMES = re.compile(
    r"(loop|sft|eval|warm_start)_appworld|\.venv-appworld|appworld evaluate|``appworld``"
    r"|appworld\.md"
)
"""Asked-for names of recipes, keys and folders, and the names that a config may give an environment."""


def test_the_loop_and_the_node_do_not_speak_of_one_environment():
    """Nothing but asked-for names; the warm start plays the solutions of one world, for the demo."""
    files = [*(ROOT / "recipes/loop_recipes").rglob("*.py"), *(ROOT / "rollout_server").rglob("*.py")]
    spoken = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if "warm_start" not in file.parts
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if "appworld" in NAMES.sub("", line).lower()
    ]
    assert spoken == []
