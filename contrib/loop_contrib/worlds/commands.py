"""The command in an assistant message, for worlds that are played by one line of text a turn."""

from __future__ import annotations

import re

COMMAND_FORMAT = "Think first if you like. End your message with one command, on a line that begins with `Action: `."
"""The agent's instruction for :func:`command_of`."""

_MARKED = re.compile(r"^[ \t]*action:[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE)


def command_of(message: str) -> str:
    """Return the text after the last ``Action:`` that begins a line; else the last line with text; "" if none."""
    if marked := _MARKED.findall(message):
        return marked[-1].strip()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def message_of(command: str) -> str:
    """Return an assistant message that gives ``command`` and nothing else."""
    return f"Action: {command}"
