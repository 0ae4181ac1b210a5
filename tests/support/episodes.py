"""Pools and episodes of tests: opened, begun, played with given messages, and closed."""

import contextlib

from agent_environments.guarded_environment import GuardedEnvironment


@contextlib.asynccontextmanager
async def open_pool(pool):
    """The pool, opened; closed at the end."""
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def begun_episode(pool, task, episode_id="episode", *, guarded=False):
    """An environment of the pool in which the task has begun, guarded as a node guards it; closed at the end."""
    environment = await pool.acquire(episode_id)
    environment = GuardedEnvironment(environment) if guarded else environment
    try:
        await environment.start(task)
        yield environment
    finally:
        await environment.close()


async def play_steps(pool, task, messages):
    """The opening, the results of the steps until one ends the episode, and the grade."""
    environment = await pool.acquire("episode")
    try:
        opening = await environment.start(task)
        steps = []
        for message in messages:
            steps.append(await environment.step(message))
            if steps[-1].done:
                break
        return opening, steps, await environment.grade()
    finally:
        await environment.close()
