"""What a terminal or a log is shown of texts from outside."""

import logging
import sys

import pytest

from loop_plumbing.breakage import MAX_ERROR_CHARACTERS, error_line
from loop_plumbing.sanitize import SanitizingFormatter, sanitize
from support.texts import texts_beside

TABLES = texts_beside(__file__)

STEERS = TABLES["steers"]


@pytest.mark.parametrize("text", STEERS)
def test_what_steers_a_terminal_is_spelled_out(text):
    assert sanitize(text) == STEERS[text]
    assert error_line(ValueError(f"answer {text!s}!")).isprintable()


def test_ordinary_text_stays_as_it_is():
    text = "é 你好 👩‍👩‍👧\n\tprint('x')"
    assert sanitize(text) == text
    assert sanitize("\x1b" * 9, 5) == "\\x1b\\"
    assert len(error_line(ValueError("x" * 10**7))) <= MAX_ERROR_CHARACTERS


def test_a_log_line_with_its_traceback_steers_no_terminal():
    try:
        raise ValueError("\x1b]0;mine\x07")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "said %s", ("\x9b",), sys.exc_info())
    line = SanitizingFormatter("%(message)s").format(record)
    assert line.startswith("said \\x9b\nTraceback")
    assert all(part.isprintable() for part in line.split("\n"))
