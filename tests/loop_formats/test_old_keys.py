"""Keys of the last release are read, with one line each that says the present one."""

import pytest

from loop_formats import old_keys
from loop_formats.old_keys import is_gone, present_key, present_keys
from loop_formats.schema import ConfigError

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(old_keys, "_said", set())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("rollout_node.config", "node"),
        ("rollout_node.config.port", "node.port"),
        ("rollout_node.config.environment.config.root", "node.environment.root"),
        (
            "rollout_node.config.environment.config.environments.a.config.max_worlds",
            "node.environment.environments.a.max_worlds",
        ),
        ("rollout_node.config.environment.config.world.config.root", "node.environment.world.root"),
        ("environment.config.root", "environment.root"),
    ],
)
def test_a_key_has_its_present_name_and_says_so_once(capsys, before, now):
    assert present_key(before) == now
    said = capsys.readouterr().err.splitlines()
    assert 1 <= len(said) <= 2
    assert present_key(before) == now
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", ["rollout_node.url", "node.environment.config_file", "checkpointer.config.a", "seed"])
def test_other_keys_stay(capsys, key):
    assert present_key(key) == key
    assert capsys.readouterr().err == ""


def test_a_file_is_read_under_present_keys(capsys):
    mixed = {"name": "mixed", "config": {"environments": {"a": {"name": "b", "config": {"c": 1}}}}}
    tree = {
        "rollout_node": {
            "launch": True,
            "config": {"port": 1, "environment": {"name": "h", "config": {"world": mixed}}},
        },
        "collection": {"sampling": SAMPLING, "split": "dev"},
        "limits": {"max_context": "${rollout_node.config.model.max_context}"},
    }
    flat = {"name": "mixed", "environments": {"a": {"name": "b", "c": 1}}}
    assert present_keys(tree) == {
        "rollout_node": {"launch": True},
        "node": {"port": 1, "environment": {"name": "h", "world": flat}},
        "collection": {"split": "dev"},
        "limits": {"max_context": "${node.model.max_context}"},
    }
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[0] == "loop: rollout_node.config is node now; the old key works for one release"
    assert present_keys(present_keys(tree)) == present_keys(tree)


def test_the_ranks_of_a_job_say_it_once(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert present_key("rollout_node.config.port") == "node.port"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", [{**SAMPLING, "temperature": 0.5}, 3, {"temprature": 1.0}])
def test_a_section_that_is_gone_is_refused_with_another_value_than_it_took(value):
    with pytest.raises(ConfigError, match=r"collection\.sampling is no key any more: training samples at"):
        present_keys({"collection": {"sampling": value}})


def test_a_section_that_is_gone_may_still_say_what_it_took():
    assert is_gone("collection.sampling.temperature", 1.0)
    assert is_gone("collection.sampling", SAMPLING)
    assert not is_gone("collection.split", "dev")
    with pytest.raises(ConfigError):
        is_gone("collection.sampling.temperature", 0.7)
