"""Shows the progress of a loop on a terminal, by a bar that moves; in a log, nothing."""

from __future__ import annotations

import threading
from typing import Any

from tqdm import tqdm

CELLS = 10
"""Characters of a bar, which is left out where they do not fit."""


class Bar(tqdm):
    """Shows the progress of a loop, on a terminal alone: counts, ten cells, times and ``facts``, as far as they fit.
    A loop that takes less than a second shows none.

    Args:
        total: number of steps; there may be more than expected.
        doing: the action, as the first word of the line.
    """

    def __init__(self, *, total: int, doing: str, disable: bool | None = None) -> None:
        self.facts: dict[str, int] = {}
        """Counts by name, such as running episodes; the line leaves out zeros."""
        self._counted_at, self._over = 0.0, threading.Event()
        self._mover = threading.Thread(target=self._move, name=f"bar: {doing}", daemon=True)
        super().__init__(
            total=total, desc=doing, leave=False, disable=disable, mininterval=1.0, delay=1.0, dynamic_ncols=True
        )
        if not self.disable:
            self._mover.start()

    def _move(self) -> None:
        """Show its seconds while a step of minutes runs."""
        while not self._over.wait(1.0):
            self.refresh()

    def update(self, n: float | None = 1) -> bool | None:
        """Count ``n`` more steps."""
        if not self.disable:
            self._counted_at = self._time()
        return super().update(n)

    def close(self) -> None:
        """Take the bar off the terminal."""
        self._over.set()
        if self._mover.is_alive():
            self._mover.join()
        super().close()

    def refresh(self, *arguments: Any, **options: Any) -> None:
        """Draw the bar, which must then be cleared at its end."""
        if not self.disable and self._time() >= self.start_t + self.delay:
            self.last_print_t = self._time()
            super().refresh(*arguments, **options)

    def __str__(self) -> str:
        known = self.format_dict
        done, total, elapsed, width = known["n"], known["total"], known["elapsed"], known["ncols"] or 80
        facts = [f"{name} {count}" for name, count in self.facts.items() if count]
        cells = f"|{'#' * (CELLS * min(done, total) // max(total, 1)):<{CELLS}}|"
        # By the speed of the steps that ended, once they are a tenth; it falls while a step runs.
        seconds = (self._counted_at - self.start_t) * total / done - elapsed if 10 * done >= total > 0 else 0.0
        left = [f"left {self.format_interval(seconds)}"] if seconds > 0 else []
        head, times = f"{known['prefix'].rstrip(': ')} {done}/{total}", [self.format_interval(elapsed), *left]
        for first, rest in ((f"{head} {cells}", [*times, *facts]), (head, [*times, *facts]), (head, [*left, *facts])):
            line = ", ".join([first, *rest])
            if len(line) < width:
                return line
        while rest and len(", ".join([head, *rest])) >= width:
            rest = rest[:-1]
        return ", ".join([head, *rest])
