"""The text that the policy reads after its code has run: output, cut to a number of tokens, then a reminder."""

from __future__ import annotations

from agent_environments.protocol import TokenSpans
from loop_plumbing.sanitize import printable

TRUNCATION_NOTE = "\n...\nExecution output is too long and is not fully shown."
REMINDER_HEAD = "\nAs a reminder\n\n"
FAILURE_HEAD = "Execution failed."


def truncate(output: str, max_tokens: int, token_spans: TokenSpans) -> str:
    """Return ``output`` if it has at most ``max_tokens`` tokens, else its head and a note.

    The head is cut at the last newline under the cap; without a newline at the last space; without a space at the cap
    itself. The note's tokens are not counted.
    """
    # Tokenizing megabytes to keep a few thousand tokens would be waste: look at a prefix, and double it while needed.
    window = max(64, 8 * max_tokens)
    while True:
        prefix = output[:window]
        spans = token_spans(prefix)
        if len(spans) > max_tokens:
            break
        if len(prefix) == len(output):
            return output
        window *= 2
    head = prefix[: spans[max_tokens][0]] if max_tokens else ""
    cut = head.rfind("\n")
    if cut <= 0:
        cut = head.rfind(" ")
    return (head[:cut] if cut > 0 else head) + TRUNCATION_NOTE


def observation(output: str, reminder: str | None, max_tokens: int, token_spans: TokenSpans) -> str:
    """Return the content of the next user message.

    ``reminder`` holds the lines that state the task; None for the last observation of an episode. It is added after
    truncation and so never cut. ``output`` may be any string.
    """
    return truncate(printable(output), max_tokens, token_spans) + reminder_end(reminder)


def reminder_end(reminder: str | None) -> str:
    """Return the end of an observation with this reminder; a ``StepResult`` holds it as ``reminder``."""
    return "" if reminder is None else REMINDER_HEAD + reminder
