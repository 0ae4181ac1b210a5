"""What the tests of the AppWorld adapter share: where the engine and the synthetic world are, and a pool on them."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_environments.protocol import Grade, StepResult, create_pool
from appworld_adapter.pool import forked
from appworld_adapter.prompt import TaskCard
from support.episodes import begun_episode

REPOSITORY = Path(__file__).parents[2]
PYTHON = os.environ.get("APPWORLD_PYTHON", str(REPOSITORY / ".venv-appworld" / "bin" / "python"))
ROOT = REPOSITORY / "worlds" / "synthetic"
SPLITS = ("train", "dev", "test_normal", "test_challenge")

needs_world = pytest.mark.skipif(
    not (os.access(PYTHON, os.X_OK) and (ROOT / "data").is_dir()), reason="needs `make setup world`"
)


def word_spans(text: str) -> list[tuple[int, int]]:
    """A tokenizer whose tokens are words and runs of white space."""
    return [match.span() for match in re.finditer(r"\S+|\s+", text)]


def make_pool(backend: str = "appworld", **options: Any) -> Any:
    config = {"python": PYTHON, "root": str(ROOT), "prompt": "tiny", "observation_max_tokens": 2000, **options}
    return create_pool(backend, config, word_spans)


@contextlib.asynccontextmanager
async def sealed_pool(level: str, agent_may_import_anything: bool = False, **options: Any) -> AsyncIterator[Any]:
    """An open pool at this level, "seccomp" or "bubblewrap"; skips the test where there is none."""
    pool = make_pool(sandbox_minimum=level, **options)
    server, more = pool._server, {"paper_parity": True} if agent_may_import_anything else {}
    pool._server = lambda role, root, settings, *prefix: server(role, root, settings | more, *prefix)
    with pytest.MonkeyPatch.context() as patch:
        if level == "seccomp":
            patch.setattr(forked, "bubblewrap_prefix", _no_bubblewrap)
        try:
            await pool.open()
        except PermissionError as error:
            pytest.skip(str(error))
    yield pool
    await pool.close()


async def _no_bubblewrap(*_: object) -> list[str]:
    raise OSError("this test does without bubblewrap")


def fenced(code: str) -> str:
    return f"Thinking.\n```python\n{code}\n```"


def volume_task() -> tuple[TaskCard, int]:
    """A task that asks to set a volume, and the volume."""
    for path in sorted((ROOT / "data" / "tasks").glob("*/specs.json")):
        card = TaskCard.load(ROOT, path.parent.name)
        wordings = r"(?:Set my Spotify volume|Change the volume on Spotify) to (\d+)\."
        if match := re.fullmatch(wordings, card.instruction):
            return card, int(match[1])
    raise LookupError("the synthetic world has no task that sets a volume")


def honest_code(card: TaskCard, volume: int) -> str:
    """Solves :func:`volume_task` as the task means it."""
    return (
        "passwords = {a['account_name']: a['password'] for a in apis.supervisor.show_account_passwords()}\n"
        f"token = apis.spotify.login(username='{card.email}', password=passwords['spotify'])['access_token']\n"
        f"print(apis.spotify.set_volume(volume={volume}, access_token=token))\n"
        "apis.supervisor.complete_task()"
    )


def database_writing_code(card: TaskCard, volume: int) -> str:
    """Sets the volume behind the APIs' back, through the engine's own models."""
    return (
        "from appworld.apps.spotify import models\n"
        f"user = models.User.find_one(email='{card.email}')\n"
        "player = models.MusicPlayer.find_one(user_id=user.id)\n"
        f"player.volume = {volume}\n"
        "player.save()\n"
        "apis.supervisor.complete_task()"
    )


def solution_steps(task_id: str) -> list[str]:
    """The reference solution, one top-level statement a step."""
    source = (ROOT / "data" / "tasks" / task_id / "ground_truth" / "solution.py").read_text()
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    return [ast.unparse(statement) for statement in function.body]


async def play(pool: Any, task_id: str, steps: list[str]) -> tuple[list[StepResult], Grade]:
    """One whole episode."""
    async with begun_episode(pool, task_id) as environment:
        results = []
        for code in steps:
            results.append(await environment.step(fenced(code)))
            if results[-1].done:
                break
        return results, await environment.grade()


def no_op_reward(task_id: str) -> float:
    """What the dataset itself says doing nothing is worth."""
    tests = json.loads((ROOT / "data" / "tasks" / task_id / "ground_truth" / "test_data.json").read_text())
    return sum(test["label"] == "no_op_pass" for test in tests) / len(tests)
