"""Makes text from outside safe to print and to encode: no lone surrogates, and nothing that steers a terminal."""

from __future__ import annotations

import io
import logging
import re
import sys

_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tab and newline, changes of the writing direction, and lone surrogates."""


def sanitize(text: str, most: int | None = None) -> str:
    """Return ``text`` cut to ``most`` characters, with an escape for each character that controls a terminal."""
    return _STEERS.sub(lambda match: ascii(match[0])[1:-1], text[:most])[:most]


def printable(text: str) -> str:
    """Return ``text`` with question marks in place of lone surrogates, which no encoder and no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()


def show_all_text() -> None:
    """Make standard output and error show ``?`` for characters that their encoding lacks, which else raise an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class SanitizingFormatter(logging.Formatter):
    """Format log records so that nothing in them, tracebacks included, controls a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record))
