"""What breaks behind a service voids no attempt: a coin earns what a coin is worth, whatever the world does over it."""

import contextlib

import pytest

from contrib_support.served_counter import TOKEN, client, serving
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from support.breaking_worlds import check_coins
from support.chat_tokenizers import write_formats

pytestmark = pytest.mark.attack


@contextlib.asynccontextmanager
async def served(protocol, pool):
    async with serving(pool) as (url, _):
        there = client(protocol, url)
        await there.open()
        try:
            yield there
        finally:
            await there.close()


@pytest.mark.parametrize("protocol", ["openenv", "agentgym"])
def test_a_coin_earns_a_coins_worth_whatever_breaks_where_it_fell_wrong(protocol, monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    check_coins(protocol, write_formats(tmp_path), served)
