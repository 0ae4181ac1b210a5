"""Passes a run's figures to trackers.

``metrics.jsonl`` has every figure; a thread for each tracker passes them on from there, once the checkpoint is saved.
So a tracker that fails, hangs or cannot be reached does not end the run, and gets missed figures later: with the next
ones, or from a resumed run. ``<output_dir>/trackers/NAME.json`` stores each tracker's progress and its run.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from loop_formats.run_files import write_whole
from loop_formats.schema import ConfigError
from loop_plumbing import running_time
from loop_plumbing.breakage import error_line
from loop_recipes.run.tracker import Point, Tracker, TrackerState, named_tracker, points

logger = logging.getLogger(__name__)

OPENING_S = 30.0
"""Seconds that a run waits at its start for a tracker to open; opening continues while the run goes on."""
HANG_S = 300.0
"""Seconds for one point after which a tracker hangs; clients try again for minutes by themselves."""
CLOSING_S = 30.0
"""Seconds that a run waits at its end for its trackers to take the remaining points."""


class Trackers:
    """The trackers of a run that has some.

    Args:
        names: keys of :data:`~loop_recipes.run.tracker.TRACKERS`.
        loggers: torchtune's metric loggers, as components.
        output_dir: the run's folder.
        config: the run's config, which is written to each tracker.
        after_iteration: the iteration of the checkpoint to resume; 0 forgets an earlier run's progress in the folder.

    Raises:
        ConfigError: a tracker is not installed, or cannot write to its path.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        loggers: Sequence[Mapping[str, Any]] = (),
        *,
        output_dir: Path = Path(),
        config: DictConfig | None = None,
        after_iteration: int = 0,
    ) -> None:
        chosen: list[tuple[str, str, Tracker]] = [(f"tracker: {name}", name, named_tracker(name)) for name in names]
        if loggers:
            from loop_recipes.run.tracker_clients import TorchtuneLogger  # most runs have none
        for number, component in enumerate(loggers):
            title = f"metric_logger[{number}]: {component['_component_']}"
            name = f"{component['_component_'].rpartition('.')[2]}-{number}"
            chosen.append((title, name, TorchtuneLogger(component)))
        config = OmegaConf.create() if config is None else config
        self._followers = [
            Follower(title, tracker, output_dir / "trackers" / name, config, after_iteration)
            for title, name, tracker in chosen
        ]
        deadline = running_time.now() + OPENING_S
        for follower in self._followers:
            follower.check_opening(deadline - running_time.now())

    def tell(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Pass every tracker all points of the run that the tracker lacks, without waiting for the trackers.

        Args:
            lines: the run's lines of metrics.jsonl.
        """
        run_points = points(lines)
        for follower in self._followers:
            follower.tell(run_points)

    def close(self) -> None:
        """Pass the remaining points to the trackers and close them, in at most :data:`CLOSING_S`. Raises nothing."""
        for follower in self._followers:
            follower.end()
        deadline = running_time.now() + CLOSING_S
        for follower in self._followers:
            follower.join(deadline - running_time.now())


class Follower:
    """Passes one tracker, in a thread of its own, the points that it lacks.

    Args:
        title: the tracker's name on the terminal.
        folder: the tracker's own folder; the progress is stored beside the folder.
    """

    def __init__(self, title: str, tracker: Tracker, folder: Path, config: DictConfig, after_iteration: int) -> None:
        self._title, self._tracker, self._folder, self._config = title, tracker, folder, config
        self._file = folder.with_suffix(".json")
        self._state, self._opened = self._read_state(after_iteration), False
        self._points: Sequence[Point] = ()
        self._news, self._ending = True, False
        self._wake = threading.Condition()
        self._tried, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._complained = False
        self._busy_since: float | None = None
        # A daemon: a tracker that hangs must not keep the process.
        threading.Thread(target=self._work, name=title, daemon=True).start()

    def check_opening(self, seconds: float) -> None:
        """Wait until the tracker has opened, has failed to open, or the time is up.

        Raises:
            ConfigError: the tracker can never open with these settings.
        """
        if not self._tried.wait(max(seconds, 0.0)):
            self._complain(self._or_offline(f"it has not opened within {OPENING_S:.0f} s"))
        elif _never_opens(self._error):
            raise ConfigError(f"{self._title}: {self._error}") from self._error

    def tell(self, points: Sequence[Point]) -> None:
        """Give the thread all points of the run."""
        with self._wake:
            self._points, self._news = points, True
            self._wake.notify()
        since = self._busy_since
        if since is not None and running_time.now() - since > HANG_S:
            self._complain(f"it has not answered for {HANG_S:.0f} s")

    def end(self) -> None:
        """Ask the thread to pass on the rest, to close the tracker and to end."""
        with self._wake:
            self._ending = True
            self._wake.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, and warn of points that the tracker lacks."""
        ended = self._ended.wait(max(seconds, 0.0))
        if (count := self._state.points) < len(self._points):
            logger.warning(
                "%s has %d of %d points; the same command with resume_from_checkpoint=True sends the rest",
                *(self._title, count, len(self._points)),
            )
        elif not ended:
            self._complain(f"it has not closed within {CLOSING_S:.0f} s")

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._news or self._ending)
                self._news, points, ending = False, self._points, self._ending
            self._attempt(self._catch_up, points)
            self._tried.set()
            if ending:
                if self._opened:
                    self._attempt(self._tracker.close)
                return self._ended.set()

    def _attempt(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except (Exception, SystemExit) as error:  # somebody else's code: none of its errors may end a run
            self._error = error
            if self._tried.is_set() or not _never_opens(error):
                self._complain(error_line(error) if self._opened else self._or_offline(error_line(error)))
        finally:
            self._busy_since = None

    def _catch_up(self, points: Sequence[Point]) -> None:
        self._busy_since = running_time.now()
        if not self._opened:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._write_state()  # stores back_to, which a later start would not see
            opened = self._tracker.open(self._folder, self._config, self._state)
            self._state = replace(opened, iteration=self._state.iteration)
            self._opened = True
            self._write_state()
        while self._state.points < len(points):
            self._busy_since = running_time.now()
            point = points[self._state.points]
            self._tracker.tell(self._state.points, point)
            latest = max(self._state.iteration, point.step)
            self._state = replace(self._state, points=self._state.points + 1, iteration=latest)
            self._write_state()

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("%s: %s; the run goes on, and metrics.jsonl has every figure", self._title, why)

    def _or_offline(self, why: str) -> str:
        return f"{why}; {self._tracker.offline}" if self._tracker.offline else why

    def _write_state(self) -> None:
        write_whole(self._file, json.dumps(asdict(self._state)))

    def _read_state(self, after_iteration: int) -> TrackerState:
        try:
            state = TrackerState(**json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # no file, or a useless one
            return TrackerState()
        if state.iteration > after_iteration > 0:
            return TrackerState(state.run, back_to=after_iteration)
        return state if after_iteration or not state.points else TrackerState()


def _never_opens(error: BaseException | None) -> bool:
    """Return whether the error comes from a wrong package or path in the config, not from an unreachable service."""
    return isinstance(error, ImportError) or getattr(error, "filename", None) is not None
