"""Requests to stop a run: SIGTERM, Ctrl-C, or a file in its output folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


class StopRequested(Exception):
    """The run was asked to stop, and stops at the point that the message names."""

    def __init__(self, where: str = "while waiting for the rollout node") -> None:
        super().__init__(where)


ANSWERS = (
    b"\nstopping after what was begun, an update or a checkpoint; a second Ctrl-C or\n"
    b"signal stops an update before its next optimizer step\n",
    b"\nstopping before the next optimizer step; a resumed run repeats the update with\n"
    b"the same rollouts; a third Ctrl-C or signal ends the run at once\n",
)
"""Answers to the first signal, and to the second."""


class StopRequest:
    """A request to stop, which a run checks at safe points. The first signal asks to stop after the update or
    checkpoint in hand, the second to leave an update before its next step; the third ends the process at once.

    Args:
        file: a file whose existence asks to stop, like the first signal.
        says: whether this process answers signals in the terminal; one process of a job does.
    """

    def __init__(self, file: Path, says: bool = True) -> None:
        self._file = file
        self._says = says
        self._signals = 0

    def listen(self) -> None:
        """Handle SIGTERM and SIGINT from now on. Call this in the main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def __bool__(self) -> bool:
        return self._signals > 0 or self._file.exists()

    def in_update(self) -> bool:
        """Return whether an update is to be left before its next optimizer step."""
        return self._signals > 1

    def done(self) -> None:
        """Delete the stop file once the run has stopped or ended, so that it does not stop a resumed run."""
        self._file.unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._says:  # not by print, which may be in the middle of a line
            os.write(2, ANSWERS[self._signals])
        self._signals += 1
        if self._signals == len(ANSWERS):
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)
