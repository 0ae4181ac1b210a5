"""Waiting for what a test can see. A test that passes does not wait, so deadlines are for machines with much to do."""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

DEADLINE_S = 300.0
"""For what takes seconds where nothing else runs."""
COMMAND_S = 900.0
"""For a whole command in a process of its own."""


async def wait_until(holds: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Return when ``holds()``, leaving the event loop to others meanwhile; fails the test after the deadline."""
    give_up = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < give_up, f"not within {deadline_s:g} s"
        await asyncio.sleep(0.01)


async def pass_time(seconds: float) -> None:
    """Have the running event loop's clock jump, and let what waited for a time before that have its turn."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
    for _ in range(5):
        await asyncio.sleep(0)


def block_until(holds: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Return when ``holds()``; fails the test after the deadline."""
    give_up = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < give_up, f"not within {deadline_s:g} s"
        time.sleep(0.02)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    """Wait for a server that was started; the test fails with the end of its log if it ends before it answers."""
    give_up = time.monotonic() + COMMAND_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S):
                return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"vLLM did not start:\n{log_path.read_text()[-4000:]}")
