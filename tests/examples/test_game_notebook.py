"""The notebook of the game: its cells run in order, inside an event loop, as those of a kernel do."""

import json
from pathlib import Path

import pytest

from loop_recipes.paths import loop_package

NOTEBOOK = Path(__file__).parents[2] / "examples/game.ipynb"
CELLS = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
BEFORE_TRAINING = CELLS[: next(place for place, cell in enumerate(CELLS) if "run = train(" in cell)]


async def run_here(cells):
    names = {}
    for cell in cells:
        exec(compile(cell, NOTEBOOK.name, "exec"), names)


async def run_in_a_kernel(cells):
    pytest.importorskip("ipykernel", reason="pip install ipykernel nbclient: a real kernel runs the notebook")
    nbclient = pytest.importorskip("nbclient", reason="pip install ipykernel nbclient: a real kernel runs the notebook")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    await nbclient.NotebookClient(notebook, timeout=None).async_execute()
    print("".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs))


@pytest.mark.fault("a notebook's cell trains or tries a task")
@pytest.mark.parametrize("run", [run_here, pytest.param(run_in_a_kernel, marks=pytest.mark.slow)])
async def test_the_task_of_the_notebook_is_whole_and_right(tmp_path, monkeypatch, capsys, run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOP_HOME", str(tmp_path))
    await run(BEFORE_TRAINING)
    right, nothing = capsys.readouterr().out.strip().splitlines()
    assert right.startswith("right:    solve(task) earns 1 on average")
    assert nothing.startswith("nothing:  doing nothing earns 0 on average")


@pytest.mark.integration
@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", [run_here, run_in_a_kernel])
async def test_the_notebook_runs_to_its_end_with_the_tiny_policy(tmp_path, monkeypatch, capsys, run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOP_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["output_dir=runs/notebook", "max_iterations=1", "collection.tasks_per_iteration=2"]
    head, _ = CELLS[0].split("MODEL = ")
    await run([f"{head}MODEL, WORDS = {str(loop_package('tiny_policy'))!r}, {words}", *CELLS[1:]])
    shown = capsys.readouterr().out
    assert "| before | T=0 |" in (tmp_path / "runs/notebook/evaluation/report.md").read_text()
    assert (tmp_path / "runs/notebook/learning_curve.png").is_file()
    assert "user: Find the key." in shown


def test_the_notebook_is_stored_with_its_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert "image/png" in shown
    assert "right:    solve(task) earns 1 on average" in shown
    assert "| after | T=1 |" in shown
    assert str(Path.home()) not in shown
