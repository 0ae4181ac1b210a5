"""Finds the reason why a vLLM server ended: the one line of its log that names it."""

from __future__ import annotations

import os
import re
from pathlib import Path

READ_BYTES = 1 << 20
MAX_CHARACTERS = 400

_PREFIX = re.compile(r"^\((?P<process>\w+)[^)]*\) (?:(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]+\] )?")
_EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Failure|Timeout|Interrupted)(?::\s.*)?$")
_USAGE = re.compile(r"^\S+: error: .+$")
# vLLM's words for another process's failure, and errors that come of ending any process.
_SECONDARY = re.compile(r"EngineDeadError|root cause|died unexpectedly|Cancelled|BrokenPipe|ConnectionReset")
_API_SERVER = "APIServer"


def own_error(file: Path, start: int) -> str | None:
    """Return the last error in the log from byte ``start`` on, in one line; None if there is none, as after a kill.

    Errors of vLLM's engine and workers have priority: the API server mostly reports only that these failed.
    """
    errors: dict[bool, str] = {}
    lines = log_text(file, start).splitlines()
    for index, line in enumerate(lines):
        prefix = _PREFIX.match(line)
        words = line[prefix.end() :] if prefix else line
        if (_EXCEPTION.match(words) or _USAGE.match(words)) and not _SECONDARY.search(words):
            engine = prefix is not None and prefix["process"] != _API_SERVER
            errors[engine] = _with_detail(words, lines[index + 1 : index + 2])
    return errors.get(True, errors.get(False))


def last_line(file: Path, start: int) -> str:
    """Return the last non-blank line of the log from byte ``start`` on, or ""."""
    return next((_cut(line) for line in reversed(log_text(file, start).splitlines()) if line.strip()), "")


def log_text(file: Path, start: int) -> str:
    """Return the log from byte ``start`` on, at most the last :data:`READ_BYTES`; "" if there is no file."""
    try:
        with open(file, "rb") as log:
            log.seek(max(start, os.path.getsize(file) - READ_BYTES))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _with_detail(words: str, following: list[str]) -> str:
    """Return an error in one line, together with pydantic's reason from the next line of the log."""
    detail = [_PREFIX.sub("", line) for line in following] if "validation error" in words else []
    return _cut(" ".join([words, *detail]))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."
