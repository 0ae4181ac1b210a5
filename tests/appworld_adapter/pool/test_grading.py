"""Whose fault it is that a state has no grade: the grader's machinery, or the state."""

from __future__ import annotations

import asyncio

import pytest

from agent_environments.protocol import EnvironmentCrashed
from appworld_adapter.pool import base
from appworld_adapter.pool.base import DatasetPool

GRADED = {"ok": True, "success": True, "num_tests": 1, "passes": [], "failures": []}


class Server:
    """A grader server; ``alive`` as the pool sees it once a process of it is gone."""

    def __init__(self, alive: bool) -> None:
        self.alive = alive

    async def wait_end(self, seconds: float, child: object) -> None:
        """It is known at once."""


class Process:
    """One grading process: answers, or dies alone ("process") or with its server ("server")."""

    ended = None

    def __init__(self, fate: str) -> None:
        self._fate = fate
        self.server = Server(alive=fate != "server")

    async def call(self, request: object) -> dict[str, object]:
        if self._fate == "graded":
            return GRADED
        raise EnvironmentCrashed("the connection to the process was lost")

    def kill(self) -> None:
        """There is none."""


def pool_of(fates: list[str], tmp_path) -> DatasetPool:
    for folder in ("datasets", "tasks"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    pool = DatasetPool(lambda text: [(0, len(text))], "python", str(tmp_path))
    queue = iter(fates)

    async def child(role: str) -> Process:
        fate = next(queue)
        if fate == "no server":
            raise EnvironmentCrashed("the grader server is gone")
        return Process(fate)

    pool._child = child
    return pool


@pytest.mark.parametrize(
    "fates",
    [
        ["server", "server", "graded"],
        ["no server", "server", "graded"],
        ["process", "server", "server", "graded"],
    ],
)
def test_a_state_whose_graders_servers_die_is_graded_by_the_next(fates, tmp_path):
    grade = asyncio.run(pool_of(fates, tmp_path).grade("abc_1", "experiment"))
    assert (grade.success, grade.ungradable) == (True, None)


def test_servers_that_keep_dying_are_no_ones_failure(tmp_path):
    fates = ["server"] * base.GRADER_SERVERS_PER_STATE + ["graded"]
    with pytest.raises(EnvironmentCrashed, match="the grader server died"):
        asyncio.run(pool_of(fates, tmp_path).grade("abc_1", "experiment"))


def test_a_state_that_ends_two_graders_beside_living_servers_is_worth_nothing(tmp_path):
    grade = asyncio.run(pool_of(["process", "process", "graded"], tmp_path).grade("abc_1", "experiment"))
    assert (grade.reward, grade.success) == (0.0, False)
    assert grade.ungradable == "the connection to the process was lost"
