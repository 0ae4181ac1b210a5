"""The worlds of `make environments`, and how a test plays in them."""

import os
from pathlib import Path

import pytest

PYTHON = os.environ.get("WORLDS_PYTHON", str(Path(__file__).parents[2] / ".venv-worlds" / "bin" / "python"))
NEEDS_WORLDS = [
    pytest.mark.integration,
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="needs `make environments`"),
]


async def play(pool, task, messages):
    """What the agent was shown, and its grade."""
    environment = await pool.acquire(task)
    shown = [message.content for message in await environment.start(task)]
    for message in messages:
        result = await environment.step(message)
        shown.append(result.observation)
        if result.done:
            break
    grade = await environment.grade()
    await environment.close()
    return shown, grade


async def expert_messages(pool, task):
    """The expert's commands as an agent writes them."""
    return [pool.message(command) for command in await pool.expert(task)]
