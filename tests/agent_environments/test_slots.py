"""A pool's places: their order, a waiter who gives up, and the end."""

import asyncio

import pytest

from agent_environments.protocol import EnvironmentCrashed
from agent_environments.slots import Slots
from support.waiting import wait_until


async def test_first_come_first_served_and_who_gives_up_holds_nothing():
    places, served = Slots(1), []

    async def visit(number):
        await places.take()
        served.append(number)

    await places.take()
    visits = [asyncio.create_task(visit(number)) for number in range(3)]
    await wait_until(lambda: places.waiting == 3)
    visits[1].cancel()
    await asyncio.wait([visits[1]])
    assert (places.taken, places.waiting) == (1, 2)
    for expected in ([0], [0, 2]):
        places.give_back()
        await wait_until(lambda expected=expected: served == expected)
    assert (places.taken, places.waiting) == (1, 0)


async def test_closed_twice_it_refuses_who_waits_and_who_comes():
    places = Slots(1)
    await places.take()
    waiting = [asyncio.create_task(places.take()) for _ in range(2)]
    await wait_until(lambda: places.waiting == 2)
    places.close()
    places.close()
    for task in [*waiting, asyncio.create_task(places.take())]:
        with pytest.raises(EnvironmentCrashed, match="the pool is closed"):
            await task
    places.give_back()
    assert (places.taken, places.waiting) == (0, 0)
