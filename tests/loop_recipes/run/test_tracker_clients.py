"""W&B, MLflow and trackio by modules of their shape, which keep what they are told as each service does."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from loop_formats.schema import ConfigError
from loop_recipes.run.metrics import RunMetrics
from loop_recipes.run.tracker import named_tracker
from loop_recipes.run.trackers import Trackers
from loop_recipes.verbs.check import main
from support.small_runs import replay_config, train

MODULES = yaml.safe_load(Path(__file__).with_name("tracker_modules.yaml").read_text())


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Install the modules; returns a function that imports one."""
    folder = tmp_path / "packages"
    for name, text in MODULES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("requests.utils.get_netrc_auth", lambda url: None)
    for variable in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("TRACKIO_DIR", "TRACKIO_STORAGE_MODE"):
        monkeypatch.setenv(variable, "set")
    yield importlib.import_module
    for module in [
        name for name in sys.modules if name.partition(".")[0] in {"wandb", "mlflow", "sqlalchemy", "trackio"}
    ]:
        del sys.modules[module]


LINES = [
    {"iteration": 1, "loss": 0.5, "environments": {"craft": {"reward": 0.25}}},
    {"iteration": 2, "loss": 0.25, "dev_iteration": 1, "dev_success": 0.125},
    {"iteration": 3, "loss": 0.75},
]
CONFIG = OmegaConf.create({"seed": 3, "update": {"epochs": 2}, "loss": {"eps": [0.1, 0.2]}})
WANTED = [
    (1, {"iteration": 1, "loss": 0.5, "craft/reward": 0.25}),
    (2, {"iteration": 2, "loss": 0.25}),
    (1, {"dev_iteration": 1, "dev_success": 0.125}),
    (3, {"iteration": 3, "loss": 0.75}),
]


def run(folder, tracker, lines, after_iteration=0):
    chosen = Trackers([tracker], output_dir=folder, config=CONFIG, after_iteration=after_iteration)
    metrics = RunMetrics(folder / "metrics.jsonl", chosen, after_iteration)
    for line in lines:
        metrics.log(line)
        metrics.tell()
    metrics.tell()
    metrics.close()


def forget(folder, tracker, points):
    """As if the process had been killed after so many points fewer were remembered than told."""
    file = folder / f"trackers/{tracker}.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "points": told["points"] - points}))


@pytest.mark.parametrize("forgotten", [0, 1, 3])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_has_each_point_once(tmp_path, packages, mode, forgotten):
    wandb = packages("wandb")
    wandb.MODE["mode"] = mode
    folder = tmp_path / "run"
    folder.mkdir()
    run(folder, "wandb", LINES[:2])
    forget(folder, "wandb", forgotten)
    run(folder, "wandb", LINES[2:], after_iteration=2)
    points, [first, second] = wandb.seen()
    assert points == [(step, {**numbers, "iteration": step}) for step, numbers in WANTED]
    assert first == second == OmegaConf.to_container(CONFIG)
    folders = [each.name.split("-")[:-1] for each in (folder / "trackers/wandb/wandb").iterdir()]
    assert sorted(folders) == ([["offline", "run", "1"]] if mode == "offline" else [["run", "0"], ["run", "1"]])


def test_wandb_is_told_what_a_killed_process_had_not_sent(tmp_path, packages):
    wandb = packages("wandb")
    run(tmp_path, "wandb", LINES[:2])
    [points] = wandb.RUNS.values()
    del points[2]  # remembered as told here
    run(tmp_path, "wandb", LINES[2:], after_iteration=2)
    assert [step for step, _ in wandb.seen()[0]] == [step for step, _ in WANTED]


@pytest.mark.parametrize("forgotten", [0, 1, 3])
def test_mlflow_has_each_point_once(tmp_path, packages, forgotten):
    tracking = packages("mlflow.tracking")
    run(tmp_path, "mlflow", LINES[:2])
    [stored] = tracking.RUNS.values()
    stored.data.tags["points"] = str(3 - min(forgotten, 1))  # killed before the tag of the last point
    forget(tmp_path, "mlflow", forgotten)
    run(tmp_path, "mlflow", LINES[2:], after_iteration=2)
    assert list(tracking.RUNS) == ["r0"]
    seen = [(metric.step, metric.key, metric.value) for metric in stored.data.metrics]
    assert seen == [(step, key, value) for step, numbers in WANTED for key, value in numbers.items()]
    assert stored.data.params == {"seed": "3", "update.epochs": "2", "loss.eps": "[0.1, 0.2]"}
    assert stored.info.status == "FINISHED"
    assert [f"sqlite:///{tmp_path}/trackers/mlflow/mlflow.db"] * 2 == tracking.URLS


def test_mlflow_takes_names_that_it_has_not_and_a_server(tmp_path, packages, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    tracking = packages("mlflow.tracking")
    run(tmp_path, "mlflow", [{"iteration": 1, "environments": {"a!": {"reward": 1.0}}}])
    [stored] = tracking.RUNS.values()
    assert [metric.key for metric in stored.data.metrics] == ["iteration", "a_/reward"]
    assert tracking.URLS == ["http://tracking:5000"]


@pytest.mark.parametrize("forgotten", [0, 1, 3])
def test_trackio_has_each_point_once(tmp_path, packages, forgotten):
    trackio = packages("trackio")
    trackio.RUNS["another"] = trackio.Run("another", {})
    run(tmp_path, "trackio", LINES[:2])
    forget(tmp_path, "trackio", forgotten)
    run(tmp_path, "trackio", LINES[2:], after_iteration=2)
    [_, stored] = trackio.RUNS.values()
    assert stored.points == WANTED
    assert stored.config == OmegaConf.to_container(CONFIG)


CLIENTS = {"wandb": "Wandb", "mlflow": "Mlflow", "trackio": "Trackio"}


def losses(stored):
    """The curve of a tracker's run: iteration and loss."""
    if hasattr(stored, "data"):
        return [(metric.step, metric.value) for metric in stored.data.metrics if metric.key == "loss"]
    told = stored.values() if isinstance(stored, dict) else stored.points
    return [(step, numbers["loss"]) for step, numbers in told if "loss" in numbers]


@pytest.mark.fault("a tracker's curve has figures of two runs")
@pytest.mark.parametrize("away", [False, True], ids=["", "away"])
@pytest.mark.parametrize("tracker", ["wandb", "wandb offline", "mlflow", "trackio"])
def test_a_run_that_goes_back_is_told_as_another(tmp_path, packages, monkeypatch, tracker, away):
    tracker, _, mode = tracker.partition(" ")
    module = packages("mlflow.tracking" if tracker == "mlflow" else tracker)
    if tracker == "wandb":
        module.MODE["mode"] = mode or "online"
    run(tmp_path, tracker, LINES)
    again = [{"iteration": number, "loss": 1.0} for number in (2, 3, 4)]
    with monkeypatch.context() as during:
        if away:  # while the iterations that were told are done again
            during.setattr(f"loop_recipes.run.tracker_clients.{CLIENTS[tracker]}.open", lambda *given: 1 / 0)
        run(tmp_path, tracker, again[:2], after_iteration=1)
    run(tmp_path, tracker, again[2:], after_iteration=3)
    given_up, kept = [(1, 0.5), (2, 0.25), (3, 0.75)], [(1, 0.5), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert [losses(stored) for stored in module.RUNS.values()] == ([kept] if tracker == "trackio" else [given_up, kept])


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_one_line_before_anything_begins(tmp_path, tracker):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1, tracker=tracker))
    with pytest.raises(ConfigError) as error:
        train(cfg)
    assert str(error.value) == f"tracker: {tracker} is not installed: pip install {tracker}, where the training runs"
    assert not (tmp_path / "run").exists()


def test_a_missing_login_names_the_offline_mode(packages, monkeypatch):
    wandb = packages("wandb")
    wandb.MODE["api_key"] = None
    check = named_tracker("wandb").check
    with pytest.raises(ConfigError, match=r"^tracker: wandb: nobody is logged in; .*WANDB_MODE=offline"):
        check()
    wandb.MODE["mode"] = "offline"
    assert check() is None
    wandb.MODE["mode"] = "online"
    monkeypatch.setattr("requests.utils.get_netrc_auth", lambda url: ("user", "key"))
    assert check() == "http://127.0.0.1:9"


def test_trackio_goes_to_no_space(packages, monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/mine")
    with pytest.raises(ConfigError, match=r"^tracker: trackio: TRACKIO_SPACE_ID is set, .*trackio sync"):
        named_tracker("trackio").check()


def test_loop_check_says_where_trackers_write_and_what_is_away(tmp_path, packages, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    main(["tiny_cpu", f"output_dir={tmp_path / 'run'}", "tracker=[tensorboard,wandb,mlflow]"])
    rows = [line.split(None, 1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("tracker ")]
    assert rows[0] == "tensorboard: on this machine"
    assert rows[1].startswith("wandb: http://127.0.0.1:9 cannot be reached: ")
    assert rows[1].endswith("; WANDB_MODE=offline writes to the run's folder, and `wandb sync` sends it")
    assert rows[2].startswith("mlflow: http://127.0.0.1:9 cannot be reached: ")
    assert rows[2].endswith("; without MLFLOW_TRACKING_URI it writes to the run's folder")


def test_loop_check_says_what_is_not_installed(tmp_path, capsys):
    assert main(["tiny_cpu", f"output_dir={tmp_path / 'run'}", "tracker=mlflow"]) == 1
    assert "problem: tracker: mlflow is not installed: pip install mlflow" in capsys.readouterr().err
