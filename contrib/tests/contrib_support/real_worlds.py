"""The worlds of `make environments`, and how a test plays in them."""

import os
from pathlib import Path

import pytest

from support.episodes import play_steps

PYTHON = os.environ.get("WORLDS_PYTHON", str(Path(__file__).parents[3] / ".venv-worlds" / "bin" / "python"))
NEEDS_WORLDS = [
    pytest.mark.integration,
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="needs `make environments`"),
]


async def play(pool, task, messages):
    """What the agent was shown, and its grade."""
    opening, steps, grade = await play_steps(pool, task, messages)
    return [message.content for message in opening] + [step.observation for step in steps], grade


async def expert_messages(pool, task):
    """The expert's commands as an agent writes them."""
    return [pool.message(command) for command in await pool.expert(task)]
