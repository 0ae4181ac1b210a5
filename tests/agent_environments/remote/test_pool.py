"""What pools of remote episodes do whatever the other side is."""

from agent_environments.remote.pool import RemotePool
from support.adapter_support import word_spans
from support.places import check_who_waits_is_refused


class NoLines(RemotePool):
    """Nobody is on the other side."""

    async def _close_lines(self) -> None:
        pass


async def test_who_waits_for_a_place_is_refused_when_the_pool_closes():
    pool = NoLines("none", word_spans, 1, 100, 1.0, 1.0)
    await check_who_waits_is_refused(pool)
