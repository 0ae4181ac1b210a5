"""What tests of tools share."""

import signal

import pytest

from agent_environments.tools import deadline


@pytest.fixture
def alarm():
    """SIGALRM ends the call that is made in this process, as in a tool process."""
    before = signal.getsignal(signal.SIGALRM)
    deadline.install()
    yield
    signal.signal(signal.SIGALRM, before)
