"""The clock that a world freezes at its task's date, frozen once before any process is forked."""

from __future__ import annotations

import freezegun


def freeze() -> None:
    """Freeze the clock in a warm parent.

    Freezing looks through every module there is, which makes a process copy most of what it inherited. Done before the
    fork it is inherited too: with a clock that is frozen already, a child's freezing only sets its date.
    """
    freezegun.freeze_time("2000-01-01").start()
