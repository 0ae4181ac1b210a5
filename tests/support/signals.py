"""Signals that come in the middle of an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from loop_recipes.algorithm.policy_update import PolicyUpdate

TWICE = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signalled(
    at: int, signals: Sequence[int] = TWICE, owner: type = PolicyUpdate, method: str = "_step"
) -> Iterator[list[int]]:
    """Have this process signalled at the end of its ``at``-th optimizer step, or call of another method, and its
    handlers as they were afterwards; gives the numbers of the calls that were made."""
    taken: list[int] = []
    step = getattr(owner, method)
    before = {number: signal.getsignal(number) for number in TWICE}

    def step_and_signal(*arguments: Any) -> Any:
        outcome = step(*arguments)
        taken.append(len(taken) + 1)
        for number in signals if len(taken) == at else ():
            os.kill(os.getpid(), number)
        return outcome

    try:
        with mock.patch.object(owner, method, step_and_signal):
            yield taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
