"""What pyproject.toml of this distribution says of its folders."""

import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from loop_plumbing.plug_ins import GROUPS, PREFIX, load, plug_ins

CONTRIB = Path(__file__).parents[2]
PROJECT = tomllib.loads((CONTRIB / "pyproject.toml").read_text())


@pytest.mark.fault("an installed wheel lacks a package")
def test_every_folder_with_code_is_a_package_of_the_wheel():
    chosen = PROJECT["tool"]["setuptools"]["packages"]["find"]
    found = set(find_packages(str(CONTRIB), include=chosen["include"]))
    folders = {file.parent.relative_to(CONTRIB) for file in (CONTRIB / "loop_contrib").rglob("*.py")}
    code = {".".join(folder.parts) for folder in folders if folder.name not in ("tests", "workers")}
    assert len(code) > 15
    assert code == found


def test_each_entry_point_is_installed_and_names_what_is_there():
    declared = PROJECT["project"]["entry-points"]
    assert {name.removeprefix(PREFIX) for name in declared} == set(GROUPS)
    for group in GROUPS:
        for name, target in declared[PREFIX + group].items():
            assert plug_ins(group)[name] == target
            load(target)
