"""The protocol of trackers, the points that a run passes to them, and the trackers that a config names by a word.

A client is imported when its tracker is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from loop_plumbing.plug_ins import load


@dataclass(frozen=True)
class Point:
    """Figures of one step.

    Attributes:
        step: the iteration; for dev scores, the iteration that made the policy.
        seconds: the run's seconds up to the step.
        numbers: the figures by flat names.
    """

    step: int
    seconds: float
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class TrackerState:
    """The progress of a tracker.

    Attributes:
        run: the tracker's own name of the run.
        points: how many points the tracker has, from the first on.
        iteration: the latest iteration of these points.
        back_to: if the run has dropped iterations that the tracker has, the iteration after which the run goes on;
            else 0.
    """

    run: str | None = None
    points: int = 0
    iteration: int = 0
    back_to: int = 0


def points(lines: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Turn lines into trackers' points with flat names: for each line the iteration's point, then points of dev scores.

    If a line gets dev scores later, the points before them stay unchanged.
    """
    result, seconds = [], 0.0
    for line in lines:
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        sections = {**line.get("environments", {}), **line.get("stated", {}), "endpoint": line.get("endpoint", {})}
        for name, figures in sections.items():
            numbers |= {f"{name}/{key}": value for key, value in figures.items() if value is not None}
        seconds += numbers.get("seconds", numbers.get("seconds_updating", 0.0))
        scores = [_take_out(numbers, beginning) for beginning in ("earlier_dev_", "dev_")]
        result.append(Point(line["iteration"], seconds, numbers))
        for score in filter(None, scores):
            dev = {f"dev_{key}": value for key, value in score.items()}
            result.append(Point(int(score["iteration"]), seconds, dev))
    return result


def _take_out(numbers: dict[str, float], beginning: str) -> dict[str, float]:
    """Remove from ``numbers`` those whose names start with ``beginning``. Return them by the rest of the names."""
    keys = [key for key in numbers if key.startswith(beginning)]
    return {key.removeprefix(beginning): numbers.pop(key) for key in keys}


class Tracker(Protocol):
    """A tracker. All calls come from one thread. An error that a call raises only prints a line on the terminal."""

    offline: str
    """Advice for a run without a network, printed when the tracker is unreachable; empty where it needs none."""

    def open(self, folder: Path, config: DictConfig, state: TrackerState) -> TrackerState:
        """Begin a run, or continue ``state.run``, and write its config. This is called again if it failed.

        With ``state.back_to`` a tracker that cannot delete points begins another run: a curve never mixes two runs.

        Args:
            folder: the tracker's own folder in the run's folder.

        Returns:
            The state, with the tracker's name of the run and the number of points that the tracker really has.
        """

    def tell(self, number: int, point: Point) -> None:
        """Store a point; points are numbered from 0."""

    def close(self) -> None:
        """Close the tracker. All points must be stored afterwards."""


class NamedTracker(Tracker, Protocol):
    """A tracker that a config names by one word."""

    def check(self) -> str | None:
        """Check before a run that the tracker can be used.

        Returns:
            The address of the tracker's service; None if the tracker writes on this machine.

        Raises:
            ConfigError: the package is missing, or nobody is logged in; the message names the cure.
        """


_CLIENTS = "loop_recipes.run.tracker_clients"
TRACKERS = {
    "tensorboard": f"{_CLIENTS}:TensorBoard",
    "wandb": f"{_CLIENTS}:Wandb",
    "mlflow": f"{_CLIENTS}:Mlflow",
    "trackio": f"{_CLIENTS}:Trackio",
}
"""Clients by the words of the key ``tracker``."""


def named_tracker(name: str) -> NamedTracker:
    """Make the client of the tracker that a config calls ``name``, a key of :data:`TRACKERS`."""
    client: NamedTracker = load(TRACKERS[name])()
    return client
