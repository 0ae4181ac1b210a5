"""Demonstrations by a world's own expert: what is played and said, and its flaws."""

import asyncio
import sys
from itertools import chain

import pytest

from agent_environments.protocol import ENVIRONMENTS, create_pool
from contrib_support.fake_world_pools import FakePool
from loop_contrib.worlds.expert import CLAIM, FLAWS, GIVING_UP, ExpertDemonstrator, flawed, possible_flaws
from loop_formats.schema import ConfigError
from loop_recipes.warm_start.demonstration import collect
from loop_recipes.warm_start.demonstrators import demonstrator_of
from rollout_server.config import EnvironmentConfig
from support.adapter_support import word_spans


@pytest.fixture
def demonstrator(monkeypatch: pytest.MonkeyPatch) -> ExpertDemonstrator:
    monkeypatch.setitem(ENVIRONMENTS, "fake", "contrib_support.fake_world_pools:FakePool")
    return ExpertDemonstrator(EnvironmentConfig("fake", {"python": sys.executable}))


def test_the_experts_play_succeeds_and_a_flawed_one_does_not(demonstrator: ExpertDemonstrator):
    scripts = demonstrator.scripts("train", 3, seed=0)
    scripts += demonstrator.scripts("train", 6, seed=1, habits=FLAWS)
    pool = create_pool("fake", demonstrator.environment.options, word_spans)
    played = asyncio.run(collect(pool, scripts, at_once=2))
    assert [one.success for one in played] == [True] * 3 + [False] * 6
    assert [one.flaw for one in played[:3]] == [None] * 3
    assert {one.flaw for one in played[3:]} <= set(FLAWS)
    target = int(played[0].task_id.removeprefix("to_"))
    assert [action for action, _ in played[0].steps] == ["Action: add"] * target
    assert demonstrator.texts(played[0])[1:] == [f"Bring 0 to {target}.", *chain.from_iterable(played[0].steps)]


class StumblingPool(FakePool):
    async def expert(self, task_id: str) -> list[str]:
        return (await super().expert(task_id))[:3]


def test_what_the_expert_cannot_solve_is_not_demonstrated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENVIRONMENTS, "stumbling", f"{__name__}:StumblingPool")
    demonstrator = ExpertDemonstrator(EnvironmentConfig("stumbling", {"python": sys.executable}))
    assert {script.task_id for script in demonstrator.scripts("train", 4, seed=0)} == {"to_3"}
    assert {script.task_id for script in demonstrator.scripts("train", 4, seed=0, habits=FLAWS)} == {"to_3"}


def test_scripts_repeat_with_their_seed_and_take_every_task_in_turn(demonstrator: ExpertDemonstrator):
    first, again, other = (demonstrator.scripts("train", 8, seed, flawed_share=0.5) for seed in (0, 0, 1))
    assert first == again != other
    assert {first[0].task_id, first[1].task_id} == {"to_3", "to_5"}
    assert {script.flaw is None for script in first} == {True, False}


def test_what_a_flaw_leaves_of_the_commands():
    commands = ["turn left", "move forward", "pick up"]
    assert flawed(commands, "gave_up") == [GIVING_UP, GIVING_UP]
    assert flawed(commands, "stopped_short") == ["turn left", "move forward", CLAIM, CLAIM]
    assert flawed(commands, "skipped_step") == ["move forward", "pick up", GIVING_UP, GIVING_UP]
    assert possible_flaws(commands) == list(FLAWS)
    assert possible_flaws(["drop"]) == ["gave_up"]


def test_what_no_expert_can_show_is_refused(demonstrator: ExpertDemonstrator):
    with pytest.raises(ConfigError, match="no demonstrations of test: no split 'test'"):
        demonstrator.scripts("test", 1, seed=0)
    with pytest.raises(ConfigError, match="'counter' has no expert to learn from"):
        ExpertDemonstrator(EnvironmentConfig("counter"))
    with pytest.raises(ConfigError, match=r"^environment: .*options it does not take"):
        ExpertDemonstrator(EnvironmentConfig("babyai", {"snake": "python"}))


@pytest.mark.parametrize(
    ("name", "world", "error"),
    [
        ("appworld", None, "practice_world must be given"),
        ("babyai", object(), "practice_world is for environment.name appworld"),
    ],
)
def test_the_practice_world_is_appworlds(name: str, world: object, error: str):
    config = type("Config", (), {"environment": EnvironmentConfig(name, {"python": "python"}), "practice_world": world})
    with pytest.raises(ConfigError, match=error):
        demonstrator_of(config)
