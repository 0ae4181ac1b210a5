"""Demonstrations of a mixture: each environment's own, with ids that the mixed pool knows."""

import asyncio
import random
import sys
from collections import Counter

import pytest

from agent_environments.description import environment_of
from agent_environments.protocol import ENVIRONMENTS, create_pool
from loop_contrib.worlds.mixed_demonstrator import MixedDemonstrator
from loop_formats.schema import ConfigError
from loop_plumbing.plug_ins import plug_ins
from loop_recipes.warm_start.demonstration import collect
from loop_recipes.warm_start.demonstrators import added_demonstrator
from rollout_server.config import EnvironmentConfig
from support.adapter_support import word_spans

PYTHON = {"python": sys.executable}


@pytest.fixture
def demonstrator(monkeypatch: pytest.MonkeyPatch) -> MixedDemonstrator:
    monkeypatch.setitem(ENVIRONMENTS, "fake", "contrib_support.fake_world_pools:FakePool")
    known = {**plug_ins("demonstrators"), "fake": "loop_contrib.worlds.expert:ExpertDemonstrator"}
    monkeypatch.setattr("loop_recipes.warm_start.demonstrators.plug_ins", lambda group: known)
    environments = {
        "adds": {"name": "fake", **PYTHON, "splits": {"practice": "train"}},
        "asks": {"name": "colbench", "splits": {"practice": "train", "once": None}},
    }
    return MixedDemonstrator(EnvironmentConfig("mixed", {"environments": environments}))


def test_both_are_played_in_equal_shares_in_the_mixed_pool(demonstrator: MixedDemonstrator):
    scripts = demonstrator.scripts("practice", 6, seed=0)
    scripts += demonstrator.scripts("practice", 6, seed=0, habits=["gave_up", "answered_at_once"])
    pool = create_pool("mixed", demonstrator.environment.options, word_spans)
    played = asyncio.run(collect(pool, scripts, at_once=2))
    assert [one.success for one in played] == [True] * 6 + [False] * 6
    assert Counter((environment_of(one.task_id), one.flaw) for one in played) == {
        ("adds", None): 3,
        ("asks", None): 3,
        ("adds", "gave_up"): 3,
        ("asks", "answered_at_once"): 3,
    }
    sections = {"adds": EnvironmentConfig("fake", PYTHON), "asks": EnvironmentConfig("colbench")}
    alone = {name: added_demonstrator(section) for name, section in sections.items()}
    for one in played:
        own = alone[environment_of(one.task_id)]
        assert demonstrator.texts(one) == own.texts(one)
        assert demonstrator.renamed(one, random.Random(3)) == own.renamed(one, random.Random(3))
    assert {demonstrator.group(one.task_id) for one in played if one.task_id.startswith("adds")} == {"adds/fake"}


def test_a_habit_is_taught_where_it_is_known(demonstrator: MixedDemonstrator):
    scripts = demonstrator.scripts("practice", 4, seed=0, habits=["gave_up"])
    assert {environment_of(script.task_id) for script in scripts} == {"adds"}
    assert set(demonstrator.flaws) >= {"gave_up", "answered_at_once"}


def test_a_split_that_nobody_has_is_refused(demonstrator: MixedDemonstrator):
    assert {environment_of(one.task_id) for one in demonstrator.scripts("practice", 2, seed=0)} == {"adds", "asks"}
    with pytest.raises(ConfigError, match="no environment of the mixture has split 'once'"):
        demonstrator.scripts("once", 4, seed=0, habits=["answered_at_once"])


@pytest.mark.parametrize(
    ("one", "said"),
    [({}, "environments.one.name must be given"), ({"name": "counter"}, "environments.one: .* no expert")],
)
def test_an_environment_without_a_name_or_an_expert_is_named(one, said):
    with pytest.raises(ConfigError, match=said):
        MixedDemonstrator(EnvironmentConfig("mixed", {"environments": {"one": one}}))
