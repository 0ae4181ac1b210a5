"""What tests of tools share."""

import signal

import pytest

from agent_environments.tools.environment import ToolPool
from loop_plumbing import deadline
from support.adapter_support import word_spans
from support.tool_modules import COUNTER, write


@pytest.fixture
def alarm():
    """SIGALRM ends the call that is made in this process, as in a tool process."""
    before = signal.getsignal(signal.SIGALRM)
    deadline.install()
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
async def one(tmp_path):
    """A pool of one instance, from a source that a test may change."""
    pools = []

    async def open_pool(source=COUNTER):
        pool = ToolPool(word_spans, write(tmp_path, source), max_worlds=1)
        pools.append(pool)
        await pool.open()
        return pool

    yield open_pool
    for pool in pools:
        await pool.close()
