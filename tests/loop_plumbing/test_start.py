"""What is arranged for every program of ours before libraries are imported."""

import importlib
import os
import sys

import pytest

import agent_environments
import loop_plumbing  # noqa: F401 - the first package below all others, which they import


@pytest.mark.fault("no HOME and no entry among the users")
@pytest.mark.parametrize(
    ("home", "known", "expected"), [(None, False, "/tmp"), (None, True, None), ("/h", False, "/h")]
)
def test_there_is_a_home_where_the_machine_names_none(monkeypatch, home, known, expected):
    """Path.home() raises there, which a library asks when torchtune imports it."""

    def entry(number):
        if not known:
            raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", entry)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.delitem(sys.modules, "loop_plumbing")
    importlib.reload(agent_environments)
    assert os.environ.get("HOME") == expected
