"""What a pool's class says without a pool, and what is said for a class that says nothing."""

import pytest

from agent_environments.pool_metadata import difficulties_of, keeping_states, keeps_states, packages_of, solutions_of
from support.adapter_support import word_spans


def test_packages_and_difficulties_are_asked_of_the_class(tmp_path):
    assert packages_of("counter", {}) == {}
    assert difficulties_of("counter", tmp_path, ["a"]) == {}
    assert difficulties_of("", tmp_path, ["a"]) == {}
    (tmp_path / "env/lib/python3.11/site-packages/appworld-0.1.3.dist-info").mkdir(parents=True)
    assert packages_of("appworld", {"python": str(tmp_path / "env/bin/python")}) == {"appworld": "0.1.3"}
    assert packages_of("appworld", {}) == {}
    assert difficulties_of("appworld", tmp_path, ["a_1"]) == {}


def test_solutions_are_of_an_environment_that_has_some(tmp_path):
    with pytest.raises(ValueError, match="environment 'counter' has no reference solutions"):
        solutions_of("counter", tmp_path, "train", "loop", word_spans)
    with pytest.raises(FileNotFoundError, match="no AppWorld dataset at"):
        solutions_of("appworld", tmp_path, "train", "loop", word_spans)


def test_final_states_are_kept_where_an_environment_can(tmp_path):
    assert not keeps_states("counter")
    assert keeps_states("appworld")
    kept = keeping_states("appworld", {"root": "r"}, tmp_path)
    assert kept == {"root": "r", "keep_experiments": True, "experiments_root": str(tmp_path)}
