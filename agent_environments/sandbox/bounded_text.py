"""Text that a program prints, kept up to a limit."""

from __future__ import annotations

import io


class BoundedText(io.StringIO):
    """Drops what is written beyond ``limit`` characters, while it is written."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, text: str) -> int:
        room = self._limit - self.tell()
        if room > 0:
            super().write(text[:room])
        return len(text)
