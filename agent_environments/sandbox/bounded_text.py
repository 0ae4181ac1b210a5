"""Text that a program prints, kept up to a limit."""

from __future__ import annotations

import io

NOT_SHOWN = "\n[... not all is shown ...]\n"


class BoundedText(io.StringIO):
    """A text stream that drops all characters beyond the first ``limit`` as they are written."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, text: str) -> int:
        room = self._limit - self.tell()
        if room > 0:
            super().write(text[:room])
        return len(text)


def shortened(text: str, most: int) -> str:
    """Shorten a text to its beginning and its end, together ``most`` characters."""
    if len(text) <= most:
        return text
    room = max(0, most - len(NOT_SHOWN))
    return text[: room // 2] + NOT_SHOWN + text[len(text) - (room - room // 2) :]
