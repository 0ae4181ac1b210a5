"""The time of an episode's agent: it runs while an action does, and stands while the machine works."""

import asyncio

import pytest

from loop_plumbing.agent_timeout import AgentTimeout, paused_agent_timeout
from support.waiting import pass_time

WHOLE_S = 1000.0


async def act(agent_timeout, seconds):
    async with agent_timeout.running():
        await pass_time(seconds)


async def test_it_ends_what_takes_longer():
    with pytest.raises(TimeoutError):
        await act(AgentTimeout(WHOLE_S), 2 * WHOLE_S)


async def test_what_ran_before_is_used_up_and_nothing_between_is():
    agent_timeout = AgentTimeout(WHOLE_S)
    await act(agent_timeout, 0.6 * WHOLE_S)
    await pass_time(WHOLE_S)
    await act(agent_timeout, 0.3 * WHOLE_S)
    with pytest.raises(TimeoutError):
        await act(agent_timeout, 0.2 * WHOLE_S)
    with pytest.raises(TimeoutError):
        await act(agent_timeout, 0.0)


async def machines_part():
    with paused_agent_timeout():
        await pass_time(2 * WHOLE_S)


async def test_what_is_not_the_agents_takes_none_of_it_in_whichever_task_it_is_done():
    async with AgentTimeout(WHOLE_S).running():
        await machines_part()
        await asyncio.create_task(machines_part())
    await machines_part()  # of no episode


async def test_it_runs_once_for_all_who_run_it_and_stands_for_all_while_one_pauses():
    agent_timeout = AgentTimeout(WHOLE_S)
    ends: list[str] = []

    async def run(name):
        try:
            async with agent_timeout.running():
                await asyncio.Event().wait()
        except TimeoutError:
            ends.append(name)

    both = [asyncio.create_task(run(name)) for name in ("program", "step")]
    await asyncio.sleep(0)  # both have begun
    await pass_time(0.6 * WHOLE_S)
    with agent_timeout.paused(), agent_timeout.paused():
        await pass_time(WHOLE_S)
    assert ends == []
    await pass_time(0.6 * WHOLE_S)
    await asyncio.gather(*both)
    assert sorted(ends) == ["program", "step"]


async def test_one_that_is_cancelled_is_no_overrun():
    task = asyncio.create_task(act(AgentTimeout(WHOLE_S), 0.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
