"""How environments describe themselves: groups of tasks of any text, names of scores, figures of behaviour."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_environments import description as described
from agent_environments.agent_turns import AgentTurn
from agent_environments.counter import CounterPool
from agent_environments.description import (
    DEFAULT_DESCRIPTION,
    TOOLS_BEHAVIOR,
    BehaviorFigure,
    Description,
    description_of,
)
from agent_environments.protocol import ENVIRONMENTS, create_pool, pool_class
from loop_plumbing.plug_ins import plug_ins
from support.texts import texts_beside
from support.tool_modules import SUMS

TABLES = texts_beside(__file__)

TOLD = TABLES["told"]


class Silent:
    """A pool's class that says nothing of itself."""


class Wrong:
    description = "a text"


class Broken:
    @property
    def description(self):
        return {}["no such"]


@pytest.fixture
def mixture(tmp_path):
    (tmp_path / "sums.py").write_text(SUMS)
    return mixed(sums={"name": "tools", "module": str(tmp_path / "sums.py")}, count={"name": "counter"})


def mixed(**environments):
    pool = create_pool("mixed", {"environments": environments}, lambda text: [])
    return description_of("mixed", pool)


HARNESS = {"tasks": {"train": ["a"]}, "accept_reward": True}


@pytest.mark.parametrize("name", sorted({*ENVIRONMENTS, *plug_ins("environments")} - {"mixed"}))
def test_every_environment_describes_itself_without_a_world_and_as_json(name):
    pool = pool_class(name) if name != "harness" else create_pool(name, HARNESS, lambda text: [])
    description = description_of(name, pool)
    assert description.name == name
    assert Description.from_dict(json.loads(json.dumps(asdict(description)))) == description
    assert description.figures or not description._all_behavior()


def test_appworld_and_a_folder_that_says_nothing_group_by_number_and_call_scores_otherwise():
    appworld = description_of("appworld", pool_class("appworld"))
    names = {"TGC": ("SGC", "scenarios"), "success": ("group success", "groups of tasks")}
    for each, score in ((appworld, "TGC"), (DEFAULT_DESCRIPTION, "success")):
        assert (each.score, (each.group_score, each.groups)) == (score, names[score])
        assert [each.group_of(task) for task in ("07b42fd_2", "a_b_10", "gsm8k-17", "_1", "x_")] == [
            "07b42fd",
            "a_b",
            "gsm8k-17",
            "_1",
            "x_",
        ]
    assert appworld.environment_of("a/b_1") == ""
    assert DEFAULT_DESCRIPTION.environment_of("a/b_1") == "a"


@pytest.mark.parametrize(("name", "complaint"), [("Wrong", "is str, not a Description"), ("Broken", "KeyError")])
def test_a_class_that_says_nothing_has_the_defaults_and_one_that_says_nonsense_is_named(name, complaint):
    silent = description_of(f"{__name__}:Silent", Silent())
    assert silent == Description(name=f"{__name__}:Silent")
    assert (silent.score, silent.group_score, silent.grouped) == ("success", "group success", False)
    with pytest.raises(ValueError, match=f"environment '.*:{name}'.*{complaint}"):
        description_of(f"{__name__}:{name}", globals()[name]())


@pytest.mark.parametrize("data", [{"score": "x", "environments": 3}, {"behavior": 3}, {"environments": {"a": 1}}])
def test_data_that_is_no_description_is_refused(data):
    with pytest.raises(ValueError, match="not a description"):
        Description.from_dict(data)
    assert Description.from_dict({"later": 1}) == Description()


MIXED = Description(environments={"inner": Description(environments={"numbered": Description(numbered=True)})})


@given(st.text(), st.text(min_size=1), st.integers(0, 10**6))
def test_any_text_is_a_task_of_one_group(task, group, number):
    """Whatever the id: a group that does not change, the task itself by default, and a mixture's own prefix kept."""
    assert Description().group_of(task) == task
    assert Description().environment_of(task) == ""
    numbered = Description(numbered=True)
    assert numbered.group_of(f"{group}_{number}") == group
    assert numbered.group_of(task) in (task, task.rpartition("_")[0])
    assert MIXED.group_of(f"inner/numbered/{group}_{number}") == f"inner/numbered/{group}"
    assert MIXED.group_of(f"inner/{task}").startswith("inner/")
    assert MIXED.environment_of(f"inner/{task}") == "inner"
    assert MIXED.environment_of(f"other/{task}") == ""


@pytest.mark.slow
def test_a_mixture_groups_by_its_members_and_names_scores_as_they_do_where_they_agree(mixture, monkeypatch):
    assert mixture.group_of("count/reach3_2") == "count/reach3"
    assert (mixture.score, mixture.groups, mixture.grouped) == ("success", "groups of tasks", True)
    assert mixture.environments["sums"].identity.keys() == {"code", "tasks", "tools"}
    assert list(mixture.whole_identity) == [f"sums/{key}" for key in mixture.environments["sums"].identity]
    assert Description.from_dict(json.loads(json.dumps(asdict(mixture)))) == mixture
    monkeypatch.setattr(CounterPool, "description", pool_class("appworld").description)
    alike = {name: {"name": "counter"} for name in "ab"}
    assert mixed(**alike).score == "TGC"
    assert mixed(**alike, c={"name": "colbench"}).score == "success"


def test_an_environment_says_what_counts_as_solved():
    lenient = Description(environments={"games": Description(unfinished_solves=True)})
    ends = ("completed", "turn_limit", None)
    assert [lenient.solved("games/a", True, end) for end in ends] == [True, True, True]
    assert [lenient.solved("a", True, end) for end in ends] == [True, False, False]
    assert not lenient.solved("games/a", False, "completed")


def test_a_name_that_is_no_environment_of_the_tasks_is_refused(mixture):
    mixture.check_environments(["sums"], ["sums/a", "count/b"])
    with pytest.raises(ValueError, match="craft has no tasks; there are tasks of count, sums"):
        mixture.check_environments(["craft"], ["sums/a", "count/b"])
    with pytest.raises(ValueError, match="a has no tasks; there are tasks of none"):
        Description().check_environments(["a"], ["a/b c"])


def test_a_figure_is_a_share_over_the_episodes_that_have_it():
    share = BehaviorFigure("bad", "bad", "bad", per="calls")
    mean = BehaviorFigure("calls", "calls", "calls")
    recovered = BehaviorFigure("lost", "lost", "calls", less="bad", per="calls", empty=0.0)
    episodes = [{"bad": 1, "calls": 3}, {"bad": 0, "calls": 1}, {"other": 7}]
    assert (share.value(episodes), mean.value(episodes), recovered.value(episodes)) == (0.25, 2.0, 0.75)
    silent = [{"bad": 0, "calls": 0}]
    assert (share.value(silent), mean.value(silent), recovered.value(silent)) == (None, 0.0, 0.0)
    assert share.value([]) is None


def test_behaviour_is_counted_by_what_a_tasks_environment_names(mixture):
    turns = [AgentTurn('<tool_call>{"name": "add", "arguments": {}}</tool_call>', None)]
    assert mixture.counts("sums/a", [(TOLD["tools"], turns)])["tool_calls"] == 1
    assert mixture.calls("sums/a", TOLD["tools"], turns) == ["add"]
    assert mixture.counts("sums/a", [(TOLD["code"], turns)]) == {}, "this conversation offers no tools"
    assert mixture.counts("count/a", [(TOLD["tools"], turns)]) == {}
    assert [figure.name for figure in mixture.figures][:1] == ["tool_calls"]


def test_figures_that_this_machine_lacks_are_left_out_and_told_of(caplog, monkeypatch):
    monkeypatch.setenv("LOOP_TRUST", "no_such_module")
    described._behavior.cache_clear()
    elsewhere = Description(behavior=("no_such_module:Behavior", TOOLS_BEHAVIOR))
    assert elsewhere.figures[0].name == "tool_calls"
    assert elsewhere.counts("a", [(TOLD["tools"], [])])["tool_calls"] == 0
    assert caplog.text.count("the figures of no_such_module:Behavior cannot be had here, and are left out") == 1
