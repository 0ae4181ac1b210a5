"""Which death of a world is chance and which is the agent's doing, on worlds that die when the test says so."""

import json
from pathlib import Path

import pytest

from agent_environments.protocol import EnvironmentCrashed, Grade
from appworld_adapter.pool.episode import WORLDS_PER_STEP, AppWorldEnvironment, EpisodeRules, Execution
from appworld_adapter.prompt import Prompt

LIVES, WORLD_DIES, INTERPRETER_DIES = "lives", "world dies", "interpreter dies"


class ScriptedPool:
    """Its n-th world meets the n-th list of fates, one per executed program; after those it lives."""

    def __init__(self, root: Path, *fates: list[str]) -> None:
        self.root, self.replays, self.fates = root, 0, list(fates)
        self.rules = EpisodeRules(Prompt("tiny"), lambda text: [(0, len(text))], 100, 10.0, 60.0)
        self.worlds: list[ScriptedWorld] = []

    def check_tasks(self, task_ids):
        pass

    async def bring_up(self, card, experiment):
        self.worlds.append(ScriptedWorld(self.fates.pop(0) if self.fates else []))
        return self.worlds[-1]

    async def grade(self, task_id, experiment):
        return Grade(0.0, False, ())

    async def release(self, environment, experiment):
        pass


class ScriptedWorld:
    def __init__(self, fates: list[str]) -> None:
        self.fates, self.executed, self.usable = fates, [], None

    async def execute(self, code):
        self.executed.append(code)
        fate = self.fates.pop(0) if self.fates else LIVES
        if fate == WORLD_DIES:
            raise EnvironmentCrashed("the world died")
        return Execution(None if fate == INTERPRETER_DIES else f"ran {code}", completed=False)

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
    environment = AppWorldEnvironment(pool, "episode")
    await environment.start("a_1")
    return [await environment.step(f"```python\n{program}\n```") for program in programs]


async def test_a_world_that_dies_is_brought_back_from_the_code(root):
    pool = ScriptedPool(root, [LIVES, WORLD_DIES])
    results = await play(pool, ["one", "two", "three"])
    assert [result.done for result in results] == [False, False, False]
    assert pool.worlds[1].executed == ["one", "two", "three"]
    assert [world.usable for world in pool.worlds] == [False, None]
    assert pool.replays == 1


async def test_death_in_a_replay_is_not_the_agents_doing(root):
    pool = ScriptedPool(root, [LIVES, INTERPRETER_DIES], [INTERPRETER_DIES])
    results = await play(pool, ["one", "two"])
    assert "ran two" in results[1].observation
    assert not results[1].done
    assert [world.executed for world in pool.worlds] == [["one", "two"], ["one"], ["one", "two"]]


async def test_code_that_kills_every_interpreter_ends_its_episode(root):
    pool = ScriptedPool(root, *([INTERPRETER_DIES] for _ in range(WORLDS_PER_STEP)))
    (result,) = await play(pool, ["abort"])
    assert result.done
    assert "The interpreter ended while it ran this code" in result.observation
    assert len(pool.worlds) == WORLDS_PER_STEP


async def test_worlds_that_keep_dying_fail_the_episode(root):
    pool = ScriptedPool(root, *([WORLD_DIES] for _ in range(WORLDS_PER_STEP)))
    with pytest.raises(EnvironmentCrashed, match="3 worlds died in one step: the world died; the world died; the"):
        await play(pool, ["one"])
    assert len(pool.worlds) == WORLDS_PER_STEP


async def test_the_agent_is_not_blamed_when_one_of_the_worlds_died_otherwise(root):
    pool = ScriptedPool(root, [INTERPRETER_DIES], [WORLD_DIES], [INTERPRETER_DIES])
    with pytest.raises(EnvironmentCrashed, match="the interpreter died; the world died; the interpreter died"):
        await play(pool, ["one"])
