"""An episode played with given messages."""


async def play_steps(pool, task, messages):
    """The opening, the results of the steps until one ends the episode, and the grade."""
    environment = await pool.acquire("episode")
    opening = await environment.start(task)
    steps = []
    for message in messages:
        steps.append(await environment.step(message))
        if steps[-1].done:
            break
    grade = await environment.grade()
    await environment.close()
    return opening, steps, grade
