"""The notebook of the game: its cells run in order."""

import json
from pathlib import Path

import pytest

from loop_recipes.paths import loop_package

NOTEBOOK = Path(__file__).parents[2] / "examples/game.ipynb"
CELLS = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def run(cells):
    names = {}
    for cell in cells:
        exec(compile(cell, NOTEBOOK.name, "exec"), names)
    return names


def test_the_task_of_the_notebook_is_whole_and_right(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before_training = next(place for place, cell in enumerate(CELLS) if "run = train(" in cell)
    run(CELLS[:before_training])
    right, nothing = capsys.readouterr().out.splitlines()
    assert right.startswith("right:    solve(task) earns 1 on average")
    assert nothing.startswith("nothing:  doing nothing earns 0 on average")


@pytest.mark.integration
@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_the_notebook_runs_to_its_end_with_the_tiny_policy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOP_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = '["output_dir=runs/notebook", "max_iterations=1", "collection.tasks_per_iteration=2"]'
    first = f'from pathlib import Path\nMODEL = "{loop_package("tiny_policy")}"\nWORDS = {small}'
    assert {"MODEL", "WORDS", "Path"} <= run(CELLS[:1]).keys() & run([first]).keys()
    run([first, *CELLS[1:]])
    shown = capsys.readouterr().out
    assert "iteration  1  reward 0." in shown
    assert "| before | T=0 |" in shown
    assert "user: Guess a number between" in shown
