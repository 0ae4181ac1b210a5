"""Has trackers told a run's figures.

``metrics.jsonl`` has every figure; a tracker is told them from there, in a thread of its own, once the checkpoint is
saved. So a tracker that fails, hangs or is away ends no run, and what it was not told then it is told later: with the
next figures, or by a resumed run. ``<output_dir>/trackers/NAME.json`` remembers how far each was told, as which run.
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
"""So long a run waits at its start for a tracker to open; it opens on while the run goes on."""
HANG_S = 300.0
"""A tracker that takes longer for one point hangs; clients try again for minutes by themselves."""
CLOSING_S = 30.0
"""So long a run waits at its end for what its trackers have not been told yet."""


class Trackers:
    """The trackers of a run that has some.

    Args:
        names: keys of :data:`~loop_recipes.run.tracker.TRACKERS`.
        loggers: torchtune's, as components.
        output_dir: the run's folder.
        config: the run's, told to each.
        after_iteration: of the checkpoint that is resumed from; 0 forgets what an earlier run in the folder told.

    Raises:
        ConfigError: one is not installed, or cannot write the path that it is given.
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
        """Have every tracker told all points of the run that it has not been told; does not wait for that.

        Args:
            lines: the run's, of metrics.jsonl.
        """
        told = points(lines)
        for follower in self._followers:
            follower.tell(told)

    def close(self) -> None:
        """Have the trackers told the rest and closed, in :data:`CLOSING_S` at most. Raises nothing."""
        for follower in self._followers:
            follower.end()
        deadline = running_time.now() + CLOSING_S
        for follower in self._followers:
            follower.join(deadline - running_time.now())


class Follower:
    """Tells one tracker, in a thread of its own, what it has not been told.

    Args:
        title: what the terminal calls it.
        folder: the tracker's own; what it was told stands beside it.
    """

    def __init__(self, title: str, tracker: Tracker, folder: Path, config: DictConfig, after_iteration: int) -> None:
        self._title, self._tracker, self._folder, self._config = title, tracker, folder, config
        self._file = folder.with_suffix(".json")
        self._told, self._opened = self._remembered(after_iteration), False
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
        """Wait until the tracker has opened, failed to, or the time is up.

        Raises:
            ConfigError: it can never open as it is asked for.
        """
        if not self._tried.wait(max(seconds, 0.0)):
            self._complain(self._or_offline(f"it has not opened within {OPENING_S:.0f} s"))
        elif _never_opens(self._error):
            raise ConfigError(f"{self._title}: {self._error}") from self._error

    def tell(self, points: Sequence[Point]) -> None:
        """Hand over all points of the run."""
        with self._wake:
            self._points, self._news = points, True
            self._wake.notify()
        since = self._busy_since
        if since is not None and running_time.now() - since > HANG_S:
            self._complain(f"it has not answered for {HANG_S:.0f} s")

    def end(self) -> None:
        """Ask the thread to tell the rest, to close the tracker and to end."""
        with self._wake:
            self._ending = True
            self._wake.notify()

    def join(self, seconds: float) -> None:
        """Wait for that, and say what could not be told."""
        ended = self._ended.wait(max(seconds, 0.0))
        if (told := self._told.points) < len(self._points):
            logger.warning(
                "%s was told %d of %d points; the same command with resume_from_checkpoint=True tells it the rest",
                *(self._title, told, len(self._points)),
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
        except (Exception, SystemExit) as error:  # somebody else's code: nothing of it may end a run
            self._error = error
            if self._tried.is_set() or not _never_opens(error):
                self._complain(error_line(error) if self._opened else self._or_offline(error_line(error)))
        finally:
            self._busy_since = None

    def _catch_up(self, points: Sequence[Point]) -> None:
        self._busy_since = running_time.now()
        if not self._opened:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._remember()  # that it goes back, which a later start would not see
            opened = self._tracker.open(self._folder, self._config, self._told)
            self._told = replace(opened, iteration=self._told.iteration)
            self._opened = True
            self._remember()
        while self._told.points < len(points):
            self._busy_since = running_time.now()
            point = points[self._told.points]
            self._tracker.tell(self._told.points, point)
            latest = max(self._told.iteration, point.step)
            self._told = replace(self._told, points=self._told.points + 1, iteration=latest)
            self._remember()

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("%s: %s; the run goes on, and metrics.jsonl has every figure", self._title, why)

    def _or_offline(self, why: str) -> str:
        return f"{why}; {self._tracker.offline}" if self._tracker.offline else why

    def _remember(self) -> None:
        write_whole(self._file, json.dumps(asdict(self._told)))

    def _remembered(self, after_iteration: int) -> TrackerState:
        try:
            told = TrackerState(**json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # none, or of no use
            return TrackerState()
        if told.iteration > after_iteration > 0:
            return TrackerState(told.run, back_to=after_iteration)
        return told if after_iteration or not told.points else TrackerState()


def _never_opens(error: BaseException | None) -> bool:
    """A package or a path is wrong: that is the config's fault, not that of a service which may come back."""
    return isinstance(error, ImportError) or getattr(error, "filename", None) is not None
