"""Commands of a longer program: how they end, and that nothing of them is left."""

import os
import signal
import sys
from pathlib import Path

import pytest

from loop_recipes.exit_status import StoppedAsAsked
from loop_recipes.steps import StepFailed, run_step, tune
from support.texts import texts_beside
from support.waiting import COMMAND_S


def python(code, *words):
    return [sys.executable, "-c", code, *map(str, words)]


@pytest.mark.slow
def test_output_is_kept_and_the_last_line_says_why(tmp_path):
    log = tmp_path / "new" / "step.log"
    run_step(python("print('first')"), log, COMMAND_S)
    with pytest.raises(StepFailed, match=r"status 3: what was wrong \(all of it: .*step\.log\)"):
        run_step(python("import sys; print('what was wrong'); print(); sys.exit(3)"), log, COMMAND_S)
    assert log.read_text() == "first\nwhat was wrong\n\n"


@pytest.mark.slow
def test_a_deadline_ends_it(tmp_path):
    with pytest.raises(StepFailed, match=r"not done after 0 s; see .*log"):
        run_step(python("import time; time.sleep(3600)"), tmp_path / "log", 0.1)


@pytest.fixture
def interruptible():
    """A shell that starts its command in the background has it ignore SIGINT, and Python then leaves it at that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


TEXTS = texts_beside(__file__)
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
"""Of a terminal, and of a scheduler or a container that ends."""


@SIGNALS
@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.fault("Ctrl-C: one promise twice, and the status of a failure")
@pytest.mark.parametrize(
    ("log", "status", "kind"), [("log", 0, KeyboardInterrupt), (None, 0, StoppedAsAsked), (None, 1, KeyboardInterrupt)]
)
def test_interrupted_it_lets_the_command_save_and_leaves_nothing_of_it(tmp_path, capfd, number, log, status, kind):
    command = python(TEXTS["saves"], os.getpid(), int(number), tmp_path / "saved", status)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run_step(command, log and tmp_path / log, COMMAND_S)
    assert type(interrupt.value) is kind
    assert (tmp_path / "saved").read_text() == "saved"
    said = (tmp_path / log).read_text() if log else capfd.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.split()[0]), signal.SIGCONT)


@pytest.mark.parametrize(("kernel", "place"), [(False, "err"), (True, "out")])
def test_progress_is_no_fault_in_a_notebook(monkeypatch, capfd, kernel, place):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    run_step(python("import sys; print('iteration 1', file=sys.stderr)"), None)
    assert getattr(capfd.readouterr(), place) == "iteration 1\n"


@SIGNALS
@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_each_further_signal_is_passed_on(tmp_path, number):
    """The command presses again each time that it hears of one, and ends at the third."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_step(python(TEXTS["presses_again"], os.getpid(), int(number)), tmp_path / "log", COMMAND_S)
    assert (tmp_path / "log").read_text() == "1\n2\n3\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.fault("a program of ours is not found when it is started otherwise")
def test_tune_is_that_of_the_torchtune_that_is_imported(monkeypatch, tmp_path):
    tune_of_here = Path(sys.executable).with_name("tune")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # as of `pip install --user`
    assert Path(tune("ls")[1]).samefile(tune_of_here)
