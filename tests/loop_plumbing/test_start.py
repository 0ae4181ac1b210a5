"""What is arranged for every program of ours before libraries are imported."""

import logging
import os

import pytest

from loop_plumbing.start import RANKS, launched, prepare_process


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


def test_torchaos_word_on_its_extensions_is_quiet(caplog):
    """It would come before the first line of every verb that imports torchtune."""
    prepare_process()
    for said in ("Skipping import of cpp extensions due to incompatible torch version 2.13.0", "another warning"):
        logging.getLogger("torchao").warning(said)
    assert caplog.messages == ["another warning"]


@pytest.mark.fault("a rank that an earlier job left in the environment")
@pytest.mark.parametrize(("job", "left", "told"), [(False, "", 7), (False, "3", 7), (True, "3", 3)])
def test_ranks_are_those_of_torchrun_alone(monkeypatch, job, left, told):
    for name in (*RANKS, *["TORCHELASTIC_RUN_ID"] * job):
        monkeypatch.setenv(name, left)
    assert [launched(name, 7) for name in RANKS] == [told] * len(RANKS)
    prepare_process()
    assert [name in os.environ for name in RANKS] == [job] * len(RANKS)
