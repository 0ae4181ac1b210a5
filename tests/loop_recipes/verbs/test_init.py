"""`loop init`: the files that it writes are a task that can be played, and tests that pass."""

import subprocess
import sys

import pytest

from loop_recipes.exit_status import StoppedAsAsked
from loop_recipes.own_task.training import OwnTask
from loop_recipes.verbs import init
from loop_recipes.verbs.init import main


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_is_written_is_a_task_with_tests_that_pass(tmp_path, capsys):
    assert main(["my_game"]) == 0
    assert "loop train my_game.py --model FOLDER" in capsys.readouterr().out
    task = OwnTask.read("my_game.py")
    assert (len(task.splits["train"]), task.held_out_groups) == (200, 40)
    assert [played.grade.reward for played in task.earned_by_nothing(3)] == [0.0] * 3
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_game.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "202 passed" in done.stdout


def test_nothing_is_overwritten_and_a_bad_name_is_refused(tmp_path, capsys):
    (tmp_path / "test_mine.py").touch()
    assert main(["mine.py"]) == 1
    assert capsys.readouterr().err == "loop init: test_mine.py is there already; choose another name\n"
    assert main(["my-game"]) == 1
    assert "'my-game' is not a name of a Python module" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]


@pytest.mark.fault("loop init of a name that Python has")
@pytest.mark.parametrize("name", ["email", "calendar.py", "token", "types", "numpy", "pytest", "class", "None"])
def test_a_name_that_would_hide_a_module_of_python_is_refused(tmp_path, capsys, name):
    assert main([name]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("choose another name")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("Ctrl-C: one promise twice, and the status of a failure")
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OSError("no room"), 1, "loop init: no room\n"),
        (KeyboardInterrupt(), 130, "loop init: stopped; the same command goes on from here\n"),
        (StoppedAsAsked(), 130, ""),
    ],
)
def test_an_end_before_its_own_is_one_line(monkeypatch, capsys, error, status, said):
    def ended(name):
        raise error

    monkeypatch.setattr(init, "_begin", ended)
    assert main(["mine"]) == status
    assert capsys.readouterr() == ("", said)
