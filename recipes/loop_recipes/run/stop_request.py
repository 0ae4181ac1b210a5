"""Whether somebody asked a run to stop: SIGTERM, Ctrl-C, or a file in its output folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


class StopRequested(Exception):
    """The run was asked to stop while it waited for rollouts, or for what the message names."""


ANSWER = (
    b"\nstopping after what was begun, an update or a checkpoint; a second Ctrl-C\n"
    b"or signal ends the run at once, and a resumed run then repeats the update\n"
)


class StopRequest:
    """Asked of at safe points of a run. The first signal asks to stop there; the second ends the process at once.

    Args:
        file: asks to stop by being there.
        says: whether this process answers the first signal in the terminal; one of a job does.
    """

    def __init__(self, file: Path, says: bool = True) -> None:
        self._file = file
        self._says = says
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
        if self._says:  # not by print, which may be in the middle of a line
            os.write(2, ANSWER)
