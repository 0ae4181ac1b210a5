"""Whose fault it is that a state has no grade: the grader's machinery, or the state."""

from __future__ import annotations

import asyncio
import sys

import pytest

from agent_environments import lost_worlds as rule
from agent_environments.lost_worlds import LOSSES_PER_COMMAND, Loss
from agent_environments.protocol import EnvironmentCrashed
from appworld_adapter.pool import forked
from appworld_adapter.pool.forked import AppWorldPool
from loop_plumbing.forked_process import ForkServer, ProcessEnded
from support.waiting import DEADLINE_S

GRADED = {"ok": True, "success": True, "num_tests": 1, "passes": [], "failures": []}


LOSSES = {"ends": Loss.ENDED, "killed": Loss.KILLED, "server": Loss.REFUSED}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rule, "PAUSE_S", 0.0)


class Process:
    """One grading process: answers, fails, or dies by itself, by a SIGKILL or with its server."""

    def __init__(self, fate: str) -> None:
        self._fate = fate

    async def exchange(self, request: object) -> dict[str, object]:
        match self._fate:
            case "graded":
                return GRADED
            case "fails":
                return {"ok": False, "message": "MemoryError"}
            case "server":
                raise EnvironmentCrashed("it died")
            case fate:
                raise ProcessEnded("it died", killed=fate == "killed")

    def kill(self) -> None:
        """There is none."""


class Server:
    """One that runs."""

    restarts = 0

    async def start(self) -> None:
        """It runs."""


def pool_of(fates: list[str], tmp_path) -> AppWorldPool:
    for folder in ("datasets", "tasks"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    pool = AppWorldPool(lambda text: [(0, len(text))], "python", str(tmp_path))
    queue = iter(fates)

    async def child(role: str) -> Process:
        fate = next(queue)
        if fate == "no server":
            raise EnvironmentCrashed("the grader server is gone")
        return Process(fate)

    pool._child = child
    pool._servers = {"grader": Server()}
    return pool


@pytest.mark.parametrize(
    "fates",
    [
        ["server", "server", "graded"],
        ["no server", "server", "graded"],
        ["killed", "server", "server", "graded"],
        ["killed", *["server"] * 10, "killed", "killed", "graded"],
        ["fails", "graded", "graded"],
    ],
    ids="/".join,
)
def test_a_state_whose_graders_die_by_the_machine_is_graded_by_the_next(fates, tmp_path):
    grade = asyncio.run(pool_of(fates, tmp_path).grade("abc_1", "experiment"))
    assert (grade.success, grade.ungradable) == (True, None)


@pytest.mark.parametrize(
    ("fates", "said"),
    [(["server"] * 9, "the grader was lost: it died"), (["fails", "fails"], "even untouched: MemoryError")],
    ids=["graders that keep dying", "nothing can be graded"],
)
def test_that_no_grader_lives_is_the_machines_failure(tmp_path, monkeypatch, fates, said):
    monkeypatch.setattr(forked, "GRADER_PATIENCE_S", 0.0)
    with pytest.raises(EnvironmentCrashed, match=said):
        asyncio.run(pool_of(fates, tmp_path).grade("abc_1", "experiment"))


@pytest.mark.parametrize("fate", ["ends", "killed"])
def test_a_state_that_ends_every_grader_beside_living_neighbours_is_worth_nothing(fate, tmp_path):
    deaths = [fate] * LOSSES_PER_COMMAND
    pool = pool_of([*deaths, "graded", *deaths], tmp_path)
    grade = asyncio.run(pool.grade("abc_1", "experiment"))
    assert (grade.reward, grade.success) == (0.0, False)
    assert f"{LOSSES_PER_COMMAND} worlds were lost over one command: the grader was lost: it died" in grade.ungradable
    assert pool.status().losses == {LOSSES[fate]: 2 * LOSSES_PER_COMMAND}


def test_a_state_that_fails_twice_where_the_untouched_one_is_graded_is_worth_nothing(tmp_path):
    grade = asyncio.run(pool_of(["fails", "graded", "fails"], tmp_path).grade("abc_1", "experiment"))
    assert (grade.reward, grade.ungradable) == (0.0, "MemoryError")


def test_a_grader_that_starts_slowly_is_no_states_failure_and_goes_on_starting(tmp_path, monkeypatch):
    monkeypatch.setattr(forked, "GRADER_START_S", 0.01)
    pool = pool_of(["graded"], tmp_path)

    async def grades() -> None:
        go, begun = tmp_path / "go", tmp_path / "begun"
        program = (
            "import json, os, socket, sys, time\n"
            f"open({str(begun)!r}, 'x').close()\n"  # a second start would fail here
            f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
            "socket.socket(fileno=int(sys.argv[1])).send(json.dumps({'ready': {}}).encode())\n"
            "time.sleep(3600)\n"
        )
        server = ForkServer("grader", (sys.executable, "-c", program), {}, EnvironmentCrashed)
        pool._servers = {"grader": server}
        try:
            with pytest.raises(EnvironmentCrashed, match=r"no grader within 0\.01 s"):
                await pool.grade("abc_1", "experiment")
            go.touch()
            monkeypatch.setattr(forked, "GRADER_START_S", DEADLINE_S)
            assert (await pool.grade("abc_1", "experiment")).success
            assert server.restarts == 0
        finally:
            await server.close()

    asyncio.run(grades())
