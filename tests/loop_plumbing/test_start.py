"""What is arranged for every program of ours before libraries are imported."""

import os

import pytest

from loop_plumbing.start import prepare_process


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
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    prepare_process()
    assert os.environ.get("HOME") == expected
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
