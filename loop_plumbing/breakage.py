"""Describes an error in somebody's code: the last line of its traceback, and the user's own file and line."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loop_plumbing.sanitize import sanitize

MAX_ERROR_CHARACTERS = 500
_PACKAGES = Path(__file__).resolve().parents[1]
_OURS = ("agent_environments", "appworld_adapter", "model_families", "rollout_server")
_LOOP = ("loop_formats", "loop_plumbing", "loop_viewer")
_IN_CHECKOUT_AND_WHEEL = ("recipes/loop_recipes", "loop_recipes", "contrib/loop_contrib", "loop_contrib")
_NOT_THE_USERS = (
    *(f"{_PACKAGES / name}/" for name in (*_OURS, *_LOOP, *_IN_CHECKOUT_AND_WHEEL)),
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)
"""Beginnings of the names of files that are ours, Python's or an installed package's."""


class Raised(Exception):
    """A user's function raised; the message is the last line of the error's traceback.

    ``place`` is the file and line in the user's own code; "" if there is none.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place

    @classmethod
    def by(cls, error: BaseException) -> Raised:
        """Build this exception from an error that was caught."""
        return cls(last_line(error), place_of(error))


@contextmanager
def raised_as(kind: Callable[[str], Exception], before: str = "", *kinds: type[Exception]) -> Iterator[None]:
    """Raise an error of the block as another ``kind``, with the text ``before`` in front of its message.

    Args:
        kinds: the exceptions that are raised as ``kind``; by default ValueError.
    """
    kinds = kinds or (ValueError,)
    try:
        yield
    except kinds as error:
        raise kind(f"{before}{error}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or the error's class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """Return the last line of the error's traceback, even if the error's ``__str__`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()


def place_of(error: BaseException) -> str:
    """Return ``file:line`` of the last frame in the user's own files; "" if there is no such frame."""
    place = ""
    for each in _chain(error):
        for frame, line in traceback.walk_tb(each.__traceback__):
            if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
                place = f"{frame.f_code.co_filename}:{line}"
        if isinstance(each, SyntaxError) and not (each.filename or "<").startswith(_NOT_THE_USERS):
            place = f"{each.filename}:{each.lineno}"
        if place:
            break
    return place


def error_line(error: BaseException) -> str:
    """Return one line on an error: its message, and the user's own file and line."""
    raised = error if isinstance(error, Raised) else Raised.by(error)
    message = traceback.format_exception_only(error)[-1] if isinstance(error, SyntaxError) else str(raised)
    message = message.removeprefix(f"{type(error).__module__}.")
    message = sanitize(" ".join(message[: 2 * MAX_ERROR_CHARACTERS].split()), MAX_ERROR_CHARACTERS)
    return f"{message} ({raised.place})" if raised.place else message


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its cause or context, then the cause or context of that error, and so on."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
