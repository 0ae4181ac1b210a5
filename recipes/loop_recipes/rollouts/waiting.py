"""Shows the purpose of a wait, its time and the obstacle: kept up to date on a terminal, seldom in a log."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from typing import TextIO

FIRST_LINE_S = 30.0
"""In a log, a wait that takes longer than this gets a line, and another each time that it took twice as long."""
REFRESH_S = 1.0


class Waiting:
    """Shows that the program waits for ``what`` while the block runs.

    Args:
        what: such as "publishing policy version 3".
        stream: where to write; None is stderr.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._detail = ""
        self._rows = 1
        self._over = threading.Event()
        self._shows = threading.Thread(target=self._show, name=f"waiting: {what}", daemon=True)

    def report(self, line: str) -> None:
        """Set the line that names the present obstacle, or the reason why the last try failed."""
        self._detail = line

    def clear(self) -> None:
        """Clear the terminal's line for other output; the line of the wait appears again below."""
        if self._stream.isatty():
            self._stream.write(f"{self._to_first_row()}\x1b[J")
            self._stream.flush()
            self._rows = 1

    def __enter__(self) -> Waiting:
        self._shows.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._shows.join()

    def _to_first_row(self) -> str:
        return f"\r\x1b[{self._rows - 1}A" if self._rows > 1 else "\r"

    def _show(self) -> None:
        began, terminal, due = time.monotonic(), self._stream.isatty(), FIRST_LINE_S
        while not self._over.wait(REFRESH_S):
            seconds = time.monotonic() - began
            line = f"{self._what}: {seconds:.0f} s{', ' * bool(self._detail)}{self._detail}"
            if terminal:
                rows = textwrap.wrap(line, shutil.get_terminal_size().columns - 1, break_on_hyphens=False)
                self._stream.write(f"{self._to_first_row()}\x1b[J" + "\n".join(rows))
                self._rows = len(rows)
            elif seconds >= due:
                self._stream.write(f"{line}\n")
                due = 2 * seconds
            self._stream.flush()
        self.clear()
