"""Whether somebody asked a run to stop: SIGTERM, Ctrl-C, or a file in its output folder."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any


class StopRequested(Exception):
    """The run was asked to stop while it waited for rollouts, or for what the message names."""


class StopRequest:
    """Asked of at safe points of a run. The first signal asks to stop there; the second ends the process at once.

    Args:
        file: asks to stop by being there.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._signalled = False

    def listen(self) -> None:
        """Take SIGTERM and SIGINT from now on; main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def __bool__(self) -> bool:
        return self._signalled or self._file.exists()

    def done(self) -> None:
        """Delete the stop file once the run has stopped or ended, so that it does not stop a resumed run."""
        self._file.unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signalled = True
        signal.signal(number, signal.SIG_DFL)
