"""Drill: W&B, MLflow and trackio, each installed from the package index, have every point of a run once, also after the
run was killed with SIGKILL and resumed; read back by each one's own reader.

    make drills K=trackers
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loop_formats.run_files import read_lines
from loop_recipes.run.tracker import points
from support.small_runs import replay_config
from support.texts import texts_beside

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800)]

PACKAGES = {"wandb": "wandb==0.31.0", "mlflow": "mlflow==3.17.2", "trackio": "trackio==0.43.0"}
READER_OF_WANDB = "wandb==0.19.11"
"""The last releases read their offline files in a terminal alone; this one has a module for it."""

TEXTS = texts_beside(__file__)
RUN, READ = TEXTS["run"], TEXTS["read"]


def python(script, *arguments, **environment):
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "WANDB_MODE": "offline", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install a package and what it needs, once, in a folder of its own; returns the folder."""
    folders = {}

    def install(package):
        if package not in folders:
            folders[package] = tmp_path_factory.mktemp("packages")
            install = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", sys.executable]
            subprocess.run([*install, "--target", folders[package], package], check=True, timeout=900)
        return folders[package]

    return install


@pytest.mark.parametrize("place", ["save_checkpoint", "tell", "log"])
@pytest.mark.parametrize("tracker", PACKAGES)
def test_every_point_is_there_once_after_a_kill_and_a_resume(tmp_path, installed, tracker, place):
    """Killed between log and save, between save and what is told, and at the next line."""
    packages = installed(PACKAGES[tracker])
    config = replay_config(tmp_path, iterations=3)
    killed = python(RUN, packages, config, tracker, place)
    assert killed.returncode == -9, killed.stderr[-2000:]
    resumed = python(RUN, packages, config, tracker, "resumed")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    lines = [line.record for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    wanted = {}
    for point in points(lines):
        for name, value in point.numbers.items():
            wanted.setdefault(name, []).append([point.step, pytest.approx(value)])
    reader = "import json, sys\nfolder = sys.argv[1]\nsys.path.insert(0, sys.argv[2])\n" + READ[tracker]
    library = installed(READER_OF_WANDB) if tracker == "wandb" else packages
    read = python(reader + "\nprint(json.dumps([seen, config]))", tmp_path / "run/trackers" / tracker, library)
    assert read.returncode == 0, read.stderr[-2000:]
    seen, config = json.loads(read.stdout.splitlines()[-1])
    assert seen == wanted
    assert config == ["3", "FINISHED"]
