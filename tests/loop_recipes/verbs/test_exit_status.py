"""The last line of a command, and its exit status."""

import pytest

from loop_recipes.verbs.exit_status import exit_status


def raising(error):
    def work():
        raise error

    return work


def test_what_was_done_is_printed(capsys):
    assert exit_status("loop-x", lambda: "3 done", (OSError,)) == 0
    assert capsys.readouterr() == ("3 done\n", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError("no log"), "loop-x: no log\n"),
        (KeyboardInterrupt(), "loop-x: stopped; the same command goes on from here\n"),
    ],
)
def test_an_end_before_that_is_one_line(error, line, capsys):
    assert exit_status("loop-x", raising(error), (OSError,)) == 1
    assert capsys.readouterr() == ("", line)


def test_any_other_error_is_a_defect_and_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_status("loop-x", raising(ZeroDivisionError()), (OSError,))
