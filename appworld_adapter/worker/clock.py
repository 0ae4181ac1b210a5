"""The clock that a world freezes at its task's date, frozen once before any process is forked."""

from __future__ import annotations

import freezegun


def freeze() -> None:
    """Freeze the clock in a parent process, before it forks.

    Freezing looks through every loaded module, so that a forked process would copy most of its inherited memory. If the
    parent has frozen the clock, a child inherits the frozen clock and only sets its date.
    """
    freezegun.freeze_time("2000-01-01").start()
