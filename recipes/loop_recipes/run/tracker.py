"""A tracker, the points that a run tells it, and the trackers that a config names by a word.

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
        step: the iteration; of dev scores, the one after which the policy stood.
        seconds: of the run, up to it.
        numbers: by flat names.
    """

    step: int
    seconds: float
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class TrackerState:
    """What a tracker was told.

    Attributes:
        run: the tracker's own name of the run.
        points: the first so many.
        iteration: the latest of those points.
        back_to: the iteration after which the run goes on, where it has given up later ones that the tracker was told;
            0 where it has not.
    """

    run: str | None = None
    points: int = 0
    iteration: int = 0
    back_to: int = 0


def points(lines: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The lines' numbers by flat names, as trackers are told them: an iteration's own, then the dev scores in its line.

    A line that gets dev scores later leaves the points before them as they are.
    """
    found, seconds = [], 0.0
    for line in lines:
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        parts = {**line.get("environments", {}), **line.get("stated", {}), "endpoint": line.get("endpoint", {})}
        for name, figures in parts.items():
            numbers |= {f"{name}/{key}": value for key, value in figures.items() if value is not None}
        seconds += numbers.get("seconds", numbers.get("seconds_updating", 0.0))
        scores = [_taken(numbers, beginning) for beginning in ("earlier_dev_", "dev_")]
        found.append(Point(line["iteration"], seconds, numbers))
        for score in filter(None, scores):
            dev = {f"dev_{key}": value for key, value in score.items()}
            found.append(Point(int(score["iteration"]), seconds, dev))
    return found


def _taken(numbers: dict[str, float], beginning: str) -> dict[str, float]:
    """Take what begins so out of ``numbers``, without that beginning."""
    keys = [key for key in numbers if key.startswith(beginning)]
    return {key.removeprefix(beginning): numbers.pop(key) for key in keys}


class Tracker(Protocol):
    """A tracker. All calls come from one thread; whatever they raise costs one line on the terminal."""

    offline: str
    """How it does without a network, for the line that says that it is away; empty where it needs none."""

    def open(self, folder: Path, config: DictConfig, told: TrackerState) -> TrackerState:
        """Begin a run, or go on with ``told.run``, and tell its config; called again after it failed.

        With ``told.back_to`` a tracker that takes nothing back begins another run: no curve may be of two.

        Args:
            folder: the tracker's own, in the run's folder.

        Returns:
            the run, and how many points it really has.
        """

    def tell(self, number: int, point: Point) -> None:
        """Take the point with this number, from 0."""

    def close(self) -> None:
        """End; what was told must be safe afterwards."""


class NamedTracker(Tracker, Protocol):
    """A tracker that a config names by one word."""

    def check(self) -> str | None:
        """Check before a run that the tracker can be told anything.

        Returns:
            The address of the service that it would be told through; None where it writes on this machine.

        Raises:
            ConfigError: its package is missing, or nobody is logged in; names the cure.
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
