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
from loop_recipes.run.metrics import points
from support.small_runs import replay_config

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800)]

PACKAGES = {"wandb": "wandb==0.31.0", "mlflow": "mlflow==3.17.2", "trackio": "trackio==0.43.0"}
READER_OF_WANDB = "wandb==0.19.11"
"""The last releases read their offline files in a terminal alone; this one has a module for it."""

RUN = """
import os, signal, sys
packages, config, tracker, place = sys.argv[1:]
sys.path.append(packages)
from omegaconf import OmegaConf
from loop_appworld import LoopAppWorldRecipe
from loop_recipes.algorithm.learner import Learner
from loop_recipes.run.metrics import RunMetrics
from support.small_runs import train

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

log = LoopAppWorldRecipe._log

def log_and_then_die(self, iteration, metrics):
    log(self, iteration, metrics)
    if iteration == 2:
        owner = Learner if place == "save_checkpoint" else RunMetrics
        setattr(owner, place, killed)

cfg = OmegaConf.load(config)
cfg.tracker = tracker
if place == "resumed":
    cfg.resume_from_checkpoint = True
else:
    LoopAppWorldRecipe._log = log_and_then_die
train(cfg)
"""

READ = {
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
[run] = client.search_runs([client.get_experiment_by_name("torchtune-loop").experiment_id])
seen = {}
for name in run.data.metrics:
    seen[name] = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
config = run.data.params["max_iterations"], run.info.status
""",
    "trackio": """
import os
os.environ["TRACKIO_DIR"] = folder
import trackio
from trackio.sqlite_storage import SQLiteStorage
[run] = trackio.Api().runs("torchtune-loop")
seen = {}
for line in SQLiteStorage.get_logs("torchtune-loop", run.name):
    step = line.pop("step")
    line.pop("timestamp")
    for name, value in line.items():
        seen.setdefault(name, []).append((step, value))
config = str(run.config["max_iterations"]), "FINISHED"
""",
    "wandb": """
import glob, json
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore
[file] = glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")
store = DataStore()
store.open_for_scan(file)
seen, settings, exits = {}, {}, 0
while (data := store.scan_data()) is not None:
    record = Record()
    record.ParseFromString(data)
    exits += record.HasField("exit")
    for item in (*record.run.config.update, *record.config.update):
        settings[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
    for name in items.keys() - {"_runtime", "_step", "_timestamp"}:
        seen.setdefault(name, []).append((items["iteration"], items[name]))
config = str(settings["max_iterations"]), "FINISHED" if exits == 1 else exits
""",
}


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
