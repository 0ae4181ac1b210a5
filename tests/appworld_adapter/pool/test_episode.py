"""Which death of a world is chance and which is the agent's doing, on worlds that die when the test says so."""

import asyncio
import errno
import json
from pathlib import Path

import pytest

from agent_environments import lost_worlds as rule
from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.lost_worlds import LOSSES_PER_COMMAND, Loss, Losses, WorldLost
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, Grade
from appworld_adapter.pool import episode as episodes
from appworld_adapter.pool.episode import KILL_GRACE_S, AppWorldEnvironment, Execution
from appworld_adapter.prompt import Prompt
from loop_plumbing.agent_timeout import AgentTimeout
from support.waiting import pass_time

LIVES, WORLD_DIES, INTERPRETER_DIES, HANGS = "lives", "world dies", "interpreter dies", "hangs"
SERVER_DIES, DISK_IS_FULL = "server dies", "disk is full"
LOSS = {WORLD_DIES: Loss.KILLED, SERVER_DIES: Loss.REFUSED, DISK_IS_FULL: Loss.NO_ROOM}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rule, "PAUSE_S", 0.0)


class ScriptedPool:
    """Its n-th world meets the n-th list of fates, one per executed program; after those it lives."""

    def __init__(self, root: Path, *fates: list[str]) -> None:
        self.root, self.replays, self.losses, self.fates = root, 0, Losses(), list(fates)
        self.worlds_there_are = 100
        self.no_world: Exception = EnvironmentCrashed("no world can be had")
        self.settles: str | Exception | None = None
        self.hanging = asyncio.Event()
        self.prompt, self.token_spans = Prompt("tiny"), lambda text: [(0, len(text))]
        self.observation_max_tokens, self.execute_timeout_s = 100, 10.0
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
        self.pool, self.fates, self.executed, self.given_back = pool, fates, [], False

    async def execute(self, code):
        self.executed.append(code)
        fate = self.fates.pop(0) if self.fates else LIVES
        if fate in LOSS:
            raise WorldLost(f"the {fate}", LOSS[fate])
        if fate == HANGS:
            self.pool.hanging.set()
            await asyncio.Event().wait()
        return Execution(None if fate == INTERPRETER_DIES else f"ran {code}", completed=False)

    async def settle(self):
        if isinstance(self.pool.settles, Exception):
            raise self.pool.settles
        return self.pool.settles

    async def give_back(self):
        self.given_back = True


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data" / "tasks" / "a_1"
    folder.mkdir(parents=True)
    supervisor = {"first_name": "A", "last_name": "B", "email": "a@b.c", "phone_number": "1"}
    specs = {"instruction": "Do it.", "supervisor": supervisor, "datetime": "2023-05-18T12:00:00"}
    (folder / "specs.json").write_text(json.dumps(specs))
    return tmp_path


async def play(pool, programs):
    environment = GuardedEnvironment(AppWorldEnvironment(pool, "episode"))
    await environment.start("a_1")
    return environment, [await environment.step(f"```python\n{program}\n```") for program in programs]


async def test_a_world_that_dies_is_brought_back_from_the_code(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES])
    environment, results = await play(pool, ["one", "two", "three"])
    assert [result.done for result in results] == [False, False, False]
    assert pool.worlds[1].executed == ["one", "two", "three"]
    assert [world.given_back for world in pool.worlds] == [True, False]
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
        [[LIVES, WORLD_DIES]] * LOSSES_PER_COMMAND,
        [[LIVES, WORLD_DIES], [INTERPRETER_DIES], [WORLD_DIES], [WORLD_DIES], [LIVES, WORLD_DIES]],
    ],
    ids=["in the step", "in the replay"],
)
async def test_worlds_that_keep_dying_end_the_episode_without_a_state_to_grade(root, fates):
    pool = ScriptedPool(root, *map(list, fates))
    environment, results = await play(pool, ["one", "two"])
    assert results[1].done
    assert len(pool.worlds) == LOSSES_PER_COMMAND
    grade = await environment.grade()
    assert (grade.reward, grade.success) == (0.0, False)
    assert f"{LOSSES_PER_COMMAND} worlds were lost over one command: the " in grade.ungradable


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EnvironmentCrashed("no world can be had"), "no world can be had"),
        (OSError(errno.ENOSPC, "No space left on device"), "no world for a_1: .*No space left"),
        (PermissionError("the sandbox is weaker than before"), "no world for a_1: the sandbox is weaker"),
    ],
)
async def test_that_no_world_can_be_had_is_not_the_agents_doing(root, error, message, monkeypatch):
    monkeypatch.setattr(episodes, "PATIENCE_S", 0.0)
    pool = ScriptedPool(root, [WORLD_DIES])
    pool.worlds_there_are, pool.no_world = 1, error
    with pytest.raises(EnvironmentCrashed, match=message):
        await play(pool, ["one"])


async def cut_short(pool, *programs):
    """An episode of these programs that is cancelled while the last one hangs."""
    environment, _ = await play(pool, programs[:-1])
    step = asyncio.create_task(environment.step(f"```python\n{programs[-1]}\n```"))
    await pool.hanging.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    return environment


async def cut_short_in_a_replay(root, *fates):
    """An episode of two steps that is cancelled while the replay for its third is under way."""
    pool = ScriptedPool(root, *fates, [LIVES, HANGS])
    return pool, await cut_short(pool, "one", "two", "three")


async def test_a_replay_that_is_cut_short_is_the_machines_failure(root):
    """Nor is the state of half an episode graded as the agent's."""
    pool, environment = await cut_short_in_a_replay(root, [LIVES, LIVES, WORLD_DIES])
    with pytest.raises(EnvironmentCrashed, match=r"its world was lost \(the world dies\) and not brought back in time"):
        await environment.grade()
    await environment.close()
    assert pool.worlds[-1].given_back


async def test_a_replay_that_is_cut_short_after_a_second_loss_leaves_nothing_to_grade(root):
    """An agent could bring that about by a slow program that uses up the machine's memory."""
    _, environment = await cut_short_in_a_replay(root, [LIVES, LIVES, WORLD_DIES], [LIVES, LIVES, WORLD_DIES])
    grade = await environment.grade()
    assert (grade.reward, grade.success) == (0.0, False)
    assert "its world was lost (the world dies) and not brought back in time" in grade.ungradable


async def test_bringing_a_world_back_is_not_on_the_episodes_clock(root):
    pool = ScriptedPool(root, [LIVES, SERVER_DIES])
    environment, _ = await play(pool, ["one"])
    bring_up = pool.bring_up

    async def slow(card, experiment):
        await pass_time(1000.0)
        return await bring_up(card, experiment)

    pool.bring_up = slow
    for program in ("two", "three"):
        async with AgentTimeout(600.0).running():
            assert not (await environment.step(f"```python\n{program}\n```")).done


async def test_a_replay_in_which_a_program_hangs_is_the_machines_failure(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES], [HANGS])
    pool.execute_timeout_s = 1.0 - KILL_GRACE_S
    environment, _ = await play(pool, ["one"])
    with pytest.raises(EnvironmentTimeout):
        await environment.step("```python\ntwo\n```")
    with pytest.raises(EnvironmentCrashed, match="not brought back in time"):
        await environment.grade()


async def test_what_a_program_does_after_a_whole_replay_is_graded_as_ever(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES], [LIVES, HANGS])
    environment = await cut_short(pool, "one", "two")
    assert (await environment.grade()).reward == 0.5


@pytest.mark.parametrize("settles", [None, "state too large", WorldLost("the world died", Loss.KILLED)])
async def test_what_a_program_did_until_its_time_was_up_is_saved_before_it_is_graded(root, settles):
    pool = ScriptedPool(root, [LIVES, HANGS])
    pool.settles = settles
    environment = await cut_short(pool, "one", "two")
    assert not pool.worlds[0].given_back, "not killed before it is settled"
    with pytest.raises(EnvironmentCrashed, match="has ended or was killed"):
        await environment.step("```python\nthree\n```")
    grade = await environment.grade()
    assert pool.worlds[0].given_back
    if settles is None:
        assert (grade.reward, grade.ungradable) == (0.5, None)
    else:
        assert grade.reward == 0.0
        assert grade.ungradable == f"what the last step did could not be saved: {settles}"


@pytest.mark.parametrize("loss", [Loss.NO_ROOM, Loss.REFUSED])
async def test_that_the_machine_cannot_save_what_a_program_did_is_its_own_failure(root, loss):
    pool = ScriptedPool(root, [HANGS])
    pool.settles = WorldLost("no room", loss)
    environment = await cut_short(pool, "one")
    with pytest.raises(EnvironmentCrashed, match="could not be saved: no room"):
        await environment.grade()


async def test_a_world_that_was_cut_short_is_given_back_without_a_grade_too(root):
    pool = ScriptedPool(root, [HANGS])
    environment = await cut_short(pool, "one")
    await environment.close()
    assert pool.worlds[0].given_back


async def test_errors_of_the_system_are_the_protocols_own(root):
    pool = ScriptedPool(root)
    (root / "data" / "tasks" / "a_1" / "specs.json").unlink()
    with pytest.raises(EnvironmentCrashed, match=r"no world for a_1: .*No such file"):
        await play(pool, [])
