"""The clients of the trackers, which pass on a run's config and figures, and how a resumed run goes on in each. Each
stores a point once, even if a process was killed: MLflow stores the number of points with the figures, and W&B takes a
point by its number. TensorBoard, trackio and W&B offline may lose points that a killed process had not written; they
get all points anew in place of the old ones.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from loop_formats.schema import ConfigError, require
from loop_recipes.config.components import build
from loop_recipes.run.tracker import Point, TrackerState

PROJECT = "torchtune-loop"
"""The project (of MLflow, the experiment) of runs where the tracker's own variable names none."""


class TorchtuneLogger:
    """A metric logger of torchtune, built from its component."""

    offline = ""

    def __init__(self, component: Mapping[str, Any]) -> None:
        self._component = component

    def open(self, folder: Path, config: DictConfig, state: TrackerState) -> TrackerState:
        self._logger = build(self._component)
        self._logger.log_config(config)
        return state

    def tell(self, number: int, point: Point) -> None:
        self._logger.log_dict(point.numbers, step=point.step)

    def close(self) -> None:
        self._logger.close()


class TensorBoard:
    """TensorBoard's event files in ``<output_dir>/trackers/tensorboard``.

    A resumed run writes all points anew and has readers drop the older ones (``purge_step``). Scalars have the old
    style, because TensorBoard's ``EventAccumulator`` drops no new-style ones.
    """

    offline = ""

    def check(self) -> str | None:
        _require_package("tensorboard", "tensorboard")
        return None

    def open(self, folder: Path, config: DictConfig, state: TrackerState) -> TrackerState:
        from torch.utils.tensorboard import SummaryWriter

        self._began = float(state.run or time.time())
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self._writer.add_text("config", f"```\n{OmegaConf.to_yaml(config)}\n```", 0, self._began)
        return TrackerState(str(self._began), 0)

    def tell(self, number: int, point: Point) -> None:
        for name, value in point.numbers.items():
            self._writer.add_scalar(name, value, point.step, self._began + point.seconds)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, in the project ``WANDB_PROJECT``. The x axis of curves is the iteration.

    W&B's own step is the number of the point; the service takes each number once. Offline the service cannot say which
    points it has, so a resumed run writes all points anew and removes the files that were not sent.
    """

    offline = "WANDB_MODE=offline writes to the run's folder, and `wandb sync` sends it"

    def check(self) -> str | None:
        _require_package("wandb", "wandb")
        import wandb
        from requests.utils import get_netrc_auth

        settings = wandb.setup().settings
        wandb.teardown()  # ends the process that setup began
        if settings.mode in ("offline", "dryrun", "disabled"):
            return None
        url = str(settings.base_url)
        logged_in = settings.api_key or settings.identity_token_file or get_netrc_auth(url)
        require(bool(logged_in), f"tracker: wandb: nobody is logged in; run `wandb login`, or {self.offline}")
        return url

    def open(self, folder: Path, config: DictConfig, state: TrackerState) -> TrackerState:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=state.run if state.run and not state.back_to else uuid.uuid4().hex[:12],
            name=_run_name(folder, state),
            resume="allow",
            dir=str(folder),
            config=_plain(config),
            allow_val_change=True,
            settings=wandb.Settings(console="off", init_timeout=25.0, finish_timeout=25.0),
        )
        if self._run.offline:
            for earlier in folder.glob(f"wandb/offline-run-*-{self._run.id}"):
                if earlier != Path(self._run.dir).parent:
                    shutil.rmtree(earlier)
        self._run.define_metric("*", step_metric="iteration")
        return TrackerState(self._run.id, self._run.step)

    def tell(self, number: int, point: Point) -> None:
        self._run.log({**point.numbers, "iteration": point.step}, step=number)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow at ``MLFLOW_TRACKING_URI`` or in a database in the run's folder, in ``MLFLOW_EXPERIMENT_NAME``.

    A tag of the run counts the points and is written with each point. If the tag was not written, the point is written
    again with the same time, by which MLflow recognizes the point.
    """

    offline = "without MLFLOW_TRACKING_URI it writes to the run's folder"

    def check(self) -> str | None:
        _require_package("mlflow", "mlflow")
        url = os.environ.get("MLFLOW_TRACKING_URI")
        if url is None:
            _require_package("sqlalchemy", "mlflow", "; mlflow-skinny has no database of its own")
        return url if url is not None and url.startswith("http") else None

    def open(self, folder: Path, config: DictConfig, state: TrackerState) -> TrackerState:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        folder.mkdir(parents=True, exist_ok=True)
        url = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(url)
        if state.run is None or state.back_to:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._run = self._client.create_run(number, run_name=_run_name(folder, state)).info.run_id
            parameters = [Param(_mlflow_name(key), str(value)[:6000]) for key, value in _flat(_plain(config))]
            for first in range(0, len(parameters), 100):  # the maximum of a request
                self._client.log_batch(self._run, params=parameters[first : first + 100])
        else:
            self._run = state.run
            self._client.update_run(self._run, status="RUNNING")
        run = self._client.get_run(self._run)
        self._began_ms = run.info.start_time
        return TrackerState(self._run, int(run.data.tags.get("points", 0)))

    def tell(self, number: int, point: Point) -> None:
        from mlflow.entities import Metric, RunTag

        at = self._began_ms + round(1000 * point.seconds)
        metrics = [Metric(_mlflow_name(name), float(value), at, point.step) for name, value in point.numbers.items()]
        self._client.log_batch(self._run, metrics=metrics, tags=[RunTag("points", str(number + 1))])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """trackio, in a database in the run's folder, or in ``TRACKIO_DIR``."""

    offline = ""

    def check(self) -> str | None:
        _require_package("trackio", "trackio")
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(variable):
                raise ConfigError(
                    f"tracker: trackio: {variable} is set, and no resumed run could tell what had arrived there; unset "
                    f"it, and publish with `trackio sync --project {PROJECT} --space-id NAME`"
                )
        return None

    def open(self, folder: Path, config: DictConfig, state: TrackerState) -> TrackerState:
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve()))
        os.environ.setdefault("TRACKIO_STORAGE_MODE", "sqlite")  # else trackio finds no runs in a network folder
        import trackio

        name = state.run or f"{_run_name(folder, state)}-{uuid.uuid4().hex[:6]}"
        try:
            earlier = [run for run in trackio.Api().runs(PROJECT) if run.name == name]
        except ValueError:  # no such project yet
            earlier = []
        for run in earlier:
            run.delete()
        self._run = trackio.init(PROJECT, name, config=_plain(config), embed=False)
        return TrackerState(name, 0)

    def tell(self, number: int, point: Point) -> None:
        self._run.log(dict(point.numbers), step=point.step)

    def close(self) -> None:
        self._run.finish()


def _require_package(module: str, package: str, why: str = "") -> None:
    installed = importlib.util.find_spec(module) is not None
    require(installed, f"tracker: {module} is not installed{why}: pip install {package}, where the training runs")


def _run_name(folder: Path, state: TrackerState) -> str:
    """Return the name of the run's folder, in which ``folder`` is; ``-after-N`` follows if the run goes back to N."""
    return folder.resolve().parents[1].name + (f"-after-{state.back_to}" if state.back_to else "")


def _plain(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _mlflow_name(name: str) -> str:
    """Replace each character that MLflow forbids in names with an underscore."""
    return re.sub(r"[^\w./: -]", "_", name)
