"""What is told of somebody's code that raised."""

import json

import pytest

from loop_plumbing.breakage import MAX_ERROR_CHARACTERS, Raised, error_line, last_line, place_of, raised_as


def raised_by(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raises")


def bad_index():
    return [][3]


def bad_json():
    return json.loads("{")  # raised in a file of Python's own


def in_spite_of(error):
    def fail():
        try:
            bad_index()
        except IndexError as cause:
            raise error from cause

    return fail


def line_of(function):
    return f"{__file__}:{function.__code__.co_firstlineno + 1}"


def test_the_last_line_and_the_users_own_file_and_line():
    error = raised_by(bad_index)
    assert error_line(error) == f"IndexError: list index out of range ({line_of(bad_index)})"


def test_a_frame_of_pythons_own_is_not_the_users():
    assert place_of(raised_by(bad_json)) == line_of(bad_json)


def test_an_error_of_ours_is_traced_to_what_it_came_of():
    cause = raised_by(bad_index)
    wrapped = RuntimeError("it failed")
    wrapped.__cause__ = cause
    assert place_of(wrapped) == line_of(bad_index)
    assert place_of(RuntimeError("raised nowhere")) == ""
    assert error_line(RuntimeError("raised nowhere")) == "RuntimeError: raised nowhere"


def test_what_a_function_raised_keeps_its_place():
    raised = Raised.by(raised_by(bad_index))
    assert str(raised) == "IndexError: list index out of range"
    assert error_line(raised) == f"IndexError: list index out of range ({line_of(bad_index)})"


class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


@pytest.mark.parametrize("error", [Mute(), ValueError("\ud800"), ValueError("a\nb"), ValueError("long" * 10_000)])
def test_whatever_an_error_says_is_one_line_of_text(error):
    said = error_line(raised_by(in_spite_of(error)))
    assert len(said.splitlines()) == 1
    assert len(said.encode()) < MAX_ERROR_CHARACTERS + 2 * len(__file__)
    assert last_line(error)


def test_an_error_is_raised_as_another_with_words_in_front_and_others_stay_as_they_are():
    with (
        pytest.raises(ValueError, match=r"^tasks: list index out of range$") as raised,
        raised_as(ValueError, "tasks: ", IndexError),
    ):
        bad_index()
    assert isinstance(raised.value.__cause__, IndexError)
    with pytest.raises(IndexError), raised_as(OSError, "tasks: "):  # of ValueErrors alone, where none is named
        bad_index()
