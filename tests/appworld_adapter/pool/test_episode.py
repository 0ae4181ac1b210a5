"""Which death of a world is chance and which is the agent's doing, on worlds that die when the test says so."""

import asyncio
import dataclasses
import errno
import json
from pathlib import Path

import pytest

from agent_environments.no_voiding import NoVoiding
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, Grade
from appworld_adapter.pool.episode import KILL_GRACE_S, WORLDS_PER_STEP, AppWorldEnvironment, EpisodeRules, Execution
from appworld_adapter.prompt import Prompt

LIVES, WORLD_DIES, INTERPRETER_DIES, HANGS = "lives", "world dies", "interpreter dies", "hangs"


class ScriptedPool:
    """Its n-th world meets the n-th list of fates, one per executed program; after those it lives."""

    def __init__(self, root: Path, *fates: list[str]) -> None:
        self.root, self.replays, self.fates = root, 0, list(fates)
        self.worlds_there_are = 100
        self.no_world: Exception = EnvironmentCrashed("no world can be had")
        self.settles: str | Exception | None = None
        self.hanging = asyncio.Event()
        self.rules = EpisodeRules(Prompt("tiny"), lambda text: [(0, len(text))], 100, 10.0)
        self.worlds: list[ScriptedWorld] = []

    def check_tasks(self, task_ids):
        pass

    async def bring_up(self, card, experiment):
        if len(self.worlds) == self.worlds_there_are:
            raise self.no_world
        self.worlds.append(ScriptedWorld(self, self.fates.pop(0) if self.fates else []))
        return self.worlds[-1]

    async def grade(self, task_id, experiment):
        return Grade(0.5, False, ())

    async def release(self, environment, experiment):
        pass


class ScriptedWorld:
    def __init__(self, pool: ScriptedPool, fates: list[str]) -> None:
        self.pool, self.fates, self.executed, self.usable = pool, fates, [], None

    async def execute(self, code):
        self.executed.append(code)
        fate = self.fates.pop(0) if self.fates else LIVES
        if fate == WORLD_DIES:
            raise EnvironmentCrashed("the world died")
        if fate == HANGS:
            self.pool.hanging.set()
            await asyncio.Event().wait()
        return Execution(None if fate == INTERPRETER_DIES else f"ran {code}", completed=False)

    async def settle(self):
        if isinstance(self.pool.settles, Exception):
            raise self.pool.settles
        return self.pool.settles

    async def give_back(self, usable):
        self.usable = usable


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data" / "tasks" / "a_1"
    folder.mkdir(parents=True)
    supervisor = {"first_name": "A", "last_name": "B", "email": "a@b.c", "phone_number": "1"}
    specs = {"instruction": "Do it.", "supervisor": supervisor, "datetime": "2023-05-18T12:00:00"}
    (folder / "specs.json").write_text(json.dumps(specs))
    return tmp_path


async def play(pool, programs):
    environment = NoVoiding(AppWorldEnvironment(pool, "episode"))
    await environment.start("a_1")
    return environment, [await environment.step(f"```python\n{program}\n```") for program in programs]


async def test_a_world_that_dies_is_brought_back_from_the_code(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES])
    environment, results = await play(pool, ["one", "two", "three"])
    assert [result.done for result in results] == [False, False, False]
    assert pool.worlds[1].executed == ["one", "two", "three"]
    assert [world.usable for world in pool.worlds] == [False, None]
    assert pool.replays == 1
    assert (await environment.grade()).reward == 0.5


async def test_code_that_kills_its_interpreter_has_no_second_try(root):
    pool = ScriptedPool(root, [LIVES, INTERPRETER_DIES])
    environment, results = await play(pool, ["one", "abort"])
    assert (results[1].done, results[1].failed) == (True, True)
    assert "The interpreter ended while it ran this code" in results[1].observation
    assert len(pool.worlds) == 1
    assert (await environment.grade()).reward == 0.5, "with all that it did until then"


async def test_death_in_a_replay_is_tried_in_another_world(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES], [INTERPRETER_DIES])
    _, results = await play(pool, ["one", "two"])
    assert "ran two" in results[1].observation
    assert not results[1].done
    assert [world.executed for world in pool.worlds] == [["one", "two"], ["one"], ["one", "two"]]


@pytest.mark.parametrize(
    "fates",
    [
        [[LIVES, WORLD_DIES]] * WORLDS_PER_STEP,
        [[LIVES, WORLD_DIES], [INTERPRETER_DIES], [WORLD_DIES]],
    ],
    ids=["in the step", "in the replay"],
)
async def test_worlds_that_keep_dying_end_the_episode_without_a_state_to_grade(root, fates):
    pool = ScriptedPool(root, *map(list, fates))
    environment, results = await play(pool, ["one", "two"])
    assert results[1].done
    assert len(pool.worlds) == WORLDS_PER_STEP
    grade = await environment.grade()
    assert (grade.reward, grade.success) == (0.0, False)
    assert "3 worlds were lost over one step: the world died; the " in grade.ungradable


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EnvironmentCrashed("no world can be had"), "no world can be had"),
        (OSError(errno.ENOSPC, "No space left on device"), "no world for a_1: .*No space left"),
        (PermissionError("the sandbox is weaker than before"), "no world for a_1: the sandbox is weaker"),
    ],
)
async def test_that_no_world_can_be_had_is_not_the_agents_doing(root, error, message):
    pool = ScriptedPool(root, [WORLD_DIES])
    pool.worlds_there_are, pool.no_world = 1, error
    with pytest.raises(EnvironmentCrashed, match=message):
        await play(pool, ["one"])


async def test_a_replay_that_is_cut_short_leaves_nothing_to_grade(root):
    """Else the state of half an episode would be graded as the agent's."""
    pool = ScriptedPool(root, [LIVES, LIVES, WORLD_DIES], [LIVES, HANGS])
    environment, _ = await play(pool, ["one", "two"])
    step = asyncio.create_task(environment.step("```python\nthree\n```"))
    await pool.hanging.wait()
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    grade = await environment.grade()
    assert (grade.reward, grade.success) == (0.0, False)
    assert "its world was lost (the world died) and not brought back in time" in grade.ungradable
    assert pool.worlds[1].usable is False


async def test_an_episode_whose_time_ends_before_its_world_is_back_leaves_nothing_to_grade(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES], [HANGS])
    pool.rules = dataclasses.replace(pool.rules, execute_timeout_s=1.0 - KILL_GRACE_S)
    environment, _ = await play(pool, ["one"])
    with pytest.raises(EnvironmentTimeout):
        await environment.step("```python\ntwo\n```")
    assert (await environment.grade()).ungradable is not None


async def test_what_a_program_does_after_a_whole_replay_is_graded_as_ever(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES], [LIVES, HANGS])
    environment, _ = await play(pool, ["one"])
    step = asyncio.create_task(environment.step("```python\ntwo\n```"))
    await pool.hanging.wait()
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    assert (await environment.grade()).reward == 0.5


@pytest.mark.parametrize("settles", [None, "disk full", EnvironmentCrashed("the world died")])
async def test_what_a_program_did_until_its_time_was_up_is_saved_before_it_is_graded(root, settles):
    pool = ScriptedPool(root, [LIVES, HANGS])
    pool.settles = settles
    environment, _ = await play(pool, ["one"])
    step = asyncio.create_task(environment.step("```python\ntwo\n```"))
    await pool.hanging.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert pool.worlds[0].usable is None, "not killed before it is settled"
    with pytest.raises(EnvironmentCrashed, match="has ended or was killed"):
        await environment.step("```python\nthree\n```")
    grade = await environment.grade()
    assert pool.worlds[0].usable is False
    if settles is None:
        assert (grade.reward, grade.ungradable) == (0.5, None)
    else:
        assert grade.reward == 0.0
        assert grade.ungradable == f"what the last step did could not be saved: {settles}"


async def test_a_world_that_was_cut_short_is_given_back_without_a_grade_too(root):
    pool = ScriptedPool(root, [HANGS])
    environment, _ = await play(pool, [])
    step = asyncio.create_task(environment.step("```python\none\n```"))
    await pool.hanging.wait()
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    await environment.close()
    assert pool.worlds[0].usable is False


async def test_errors_of_the_system_are_the_protocols_own(root):
    pool = ScriptedPool(root)
    (root / "data" / "tasks" / "a_1" / "specs.json").unlink()
    with pytest.raises(EnvironmentCrashed, match=r"no world for a_1: .*No such file"):
        await play(pool, [])
