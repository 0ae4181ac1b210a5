"""Prints lines for a terminal of 80 columns or more, folded where they are wider."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

LOG_COLUMNS = 180
"""Width of a log file, which has none of its own, so that tables keep their rows."""


def console(stream: TextIO) -> Console:
    """Return a console on ``stream``: as wide as the terminal is, or :data:`LOG_COLUMNS` in a log."""
    from rich.console import Console  # most verbs print lines alone

    return Console(file=stream) if stream.isatty() else Console(file=stream, width=LOG_COLUMNS)


def folded(line: str, stream: TextIO, between: str = " ") -> str:
    """Return ``line`` for ``stream``: unchanged for a log, and folded to the terminal's width for a terminal.

    Args:
        between: where the line may be divided; a piece that is wider than the terminal stays whole.
    """
    width, lines = shutil.get_terminal_size().columns - 1, [""]
    if not stream.isatty() or len(line) <= width:
        return line
    for piece in line.split(between):
        longer = f"{lines[-1]}{between}{piece}" if lines[-1].strip() else lines[-1] + piece
        if len(longer) <= width or not lines[-1].strip():
            lines[-1] = longer
        else:
            lines.append(f"  {piece}")
    return "\n".join(lines)


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Print texts, each line whole: on a terminal, a wider line is folded, and its continuation is indented below the
    text after its first word, if two blanks follow that word."""
    stream = stream or sys.stdout
    for line in (each for text in lines for each in text.split("\n")):
        if stream.isatty() and line:
            head = re.match(r" *\S+(?: \S+)? {2,}", line[:24])
            below = " " * (head.end() if head else len(line) - len(line.lstrip()) + 2)
            width = shutil.get_terminal_size().columns - 1
            if len(line) > width:  # a row of a table that fits keeps its blanks
                line = textwrap.fill(
                    line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
                )
        print(line, file=stream)


class _Folding(logging.Formatter):
    """Divides log lines where a terminal of this width would break a word."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(folded(line, sys.stderr) for line in super().format(record).split("\n"))


def fold_logs() -> None:
    """Divide lines of torchtune's logger, and warnings of all others, at blanks on a terminal."""
    for handler in (logging.lastResort, *logging.getLogger("torchtune.utils._logging").handlers):
        if handler is not None:
            handler.setFormatter(_Folding())
