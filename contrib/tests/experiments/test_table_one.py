"""experiments/table_one.py: what each row runs, what a second start repeats, and the table from known results."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from loop_formats.run_files import ADAPTER_FILES, write_rollouts
from loop_recipes import steps
from loop_recipes.steps import StepFailed
from support.experiment_scripts import check_tables, load_experiment, made_up_evaluation, made_up_record
from support.small_runs import stored_rollout

SOLVED = {"loop_token": 2, "rft": 1}
"""How many of the three held-out tasks a row's policies solve; the others none."""


@pytest.fixture(scope="module")
def table_one():
    return load_experiment("table_one")


class Commands:
    """In place of the commands: remembers them, and leaves behind what they would; ``fail_at`` of them fails."""

    def __init__(self, fail_at=None):
        self.commands, self.fail_at = [], fail_at

    def __call__(self, command, log, deadline_s=None):
        self.commands.append(command)
        if len(self.commands) == self.fail_at:
            raise StepFailed("killed")
        if "loop_contrib.ground_truth.ground_truth" in command:
            return
        out = Path(said(command, "output_dir"))
        if "eval_appworld" in command:
            solved = SOLVED.get(out.parent.name.rpartition("-")[0], 0)
            return made_up_evaluation(out, {task: number < solved for number, task in enumerate(held_out(command))})
        if any("sft_appworld" in word or word == "loop_appworld" for word in command):
            (out / "policies/policy-v0002").mkdir(parents=True)
            for name in ADAPTER_FILES:
                (out / "policies/policy-v0002" / name).touch()
            (out / "config.yaml").write_text("max_iterations: 2\noptimizer: {lr: 0.001}\n")
            lines = [{"iteration": number, "steps": 3} for number in (1, 2)]
            (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if "sft_appworld" not in command:
            sampled = [stored_rollout("made-up", f"task_{number}", 0, 0, 1.0, 50, number) for number in range(4)]
            write_rollouts(out / "node/collections", "made-up", sampled)


def said(command, key):
    return next((word.removeprefix(f"{key}=") for word in command if word.startswith(f"{key}=")), None)


def held_out(command):
    """The tasks that an evaluation is told, as its config reads them."""
    return list(OmegaConf.from_dotlist([f"tasks={said(command, 'tasks')}"]).tasks)


@pytest.fixture
def world(tmp_path):
    """A dataset in which only the splits are looked at."""
    folder = tmp_path / "world/data/datasets"
    folder.mkdir(parents=True)
    (tmp_path / "world/data/tasks").mkdir()
    (folder / "train.txt").write_text("\n".join(f"train{n}_1" for n in range(5)) + "\n")
    (folder / "test_normal.txt").write_text("\n".join(f"109929{n}_1" for n in range(4)) + "\n")
    (tmp_path / "world/dataset.json").write_text(json.dumps({"name": "made-up"}))
    return tmp_path / "world"


def run(table_one, monkeypatch, tmp_path, world, commands, *words):
    monkeypatch.setattr(steps, "run_step", commands)
    arguments = ["--output", str(tmp_path / "out"), "--seeds", "0", "1", "--budget", "24", "--train-tasks", "2"]
    root = f"node.environment.root={world}"
    table_one.main([*arguments, "--held-out-tasks", "3", "--runs", "1", *words, "--", "collection.split=train", root])


def test_every_row_runs_and_is_scored_with_the_same_budget(table_one, monkeypatch, tmp_path, world, capsys):
    played = Commands()
    run(table_one, monkeypatch, tmp_path, world, played)
    evaluations = [command for command in played.commands if "eval_appworld" in command]
    assert len(evaluations) == 2 * len(table_one.ROWS)
    assert all(held_out(command) == ["1099290_1", "1099291_1", "1099292_1"] for command in evaluations)
    online = [command for command in played.commands if "loop_appworld" in command]
    assert {said(command, "max_iterations") for command in online} == {"2"}, "24 rollouts are two of 2 x 6"
    assert {said(command, "collection.min_rollouts_per_task") for command in online} == {"6"}
    searching = "loop_contrib.dpo_mcts.search_trees"
    (trees,) = [c for c in played.commands if searching in c and said(c, "seed") == "0"]
    assert trees[trees.index("--iterations") + 1] == "10", "2 tasks x (2 + 10)"
    (rft,) = [c for c in played.commands if "loop_contrib.rft.collect_solved" in c and said(c, "seed") == "1"]
    assert rft[rft.index("--rollouts") + 1] == "24"
    out = capsys.readouterr().out
    assert "| LOOP (token) | 2 | 4 ± 0 | " in out
    assert "| base | 2 | 0 ± 0 | 0 ± 0 | 0 ± 0 | 0.500 | 0.0 [0.0, " in out
    assert "| RFT against LOOP (token) | T=1 | -33.3 [" in out
    again = Commands()
    run(table_one, monkeypatch, tmp_path, world, again)
    assert again.commands == []
    with pytest.raises(SystemExit, match=rf"{2 * len(table_one.ROWS)} attempt\(s\) failed"):
        run(table_one, monkeypatch, tmp_path, world, again, "--epochs", "7")
    assert again.commands == []
    assert "was begun with another epochs" in capsys.readouterr().out


def test_a_row_that_was_cut_off_goes_on_with_the_step_that_was_not_done(table_one, monkeypatch, tmp_path, world):
    before, after, numbers = Commands(fail_at=2), Commands(), tmp_path / "numbers.json"
    words = ["--rows", "rft", "--seeds", "0", "--json", str(numbers)]
    with pytest.raises(SystemExit, match="holds no record of these rows and seeds"):
        run(table_one, monkeypatch, tmp_path, world, before, *words)
    run(table_one, monkeypatch, tmp_path, world, after, *words)
    assert len(after.commands) == 2
    assert after.commands[0] == before.commands[1]
    known = {row["metric"]: row["value"] for row in json.loads(numbers.read_text())}
    assert known["rollouts"] == 4
    assert known["optimizer_steps"] == 6
    assert known["tgc"] == pytest.approx(33.3, abs=0.1)


def test_a_budget_that_suffices_for_no_iteration_is_refused(table_one, monkeypatch, tmp_path, world):
    for budget in ("5", "11"):
        with pytest.raises(SystemExit, match=r"--budget .* is too small for one iteration"):
            run(table_one, monkeypatch, tmp_path, world, Commands(), "--budget", budget)


def test_a_record_is_not_made_again_and_suffices_for_the_table(table_one, monkeypatch, tmp_path, world, capsys):
    """Of algorithms.py, say, or of another machine."""
    steps_of = [{"iteration": 1, "steps": 3}, {"iteration": 2, "steps": 4}]
    made_up_record("loop_token", 0, steps_of, budget=24).write(tmp_path / "others.jsonl")
    played, words = Commands(), ["--rows", "loop_token", "--records", str(tmp_path / "others.jsonl")]
    run(table_one, monkeypatch, tmp_path, world, played, *words, "--seeds", "0")
    assert played.commands == []
    assert "| LOOP (token) | 1 | 24 | 1200 | 7 | " in capsys.readouterr().out
    fails = Commands(fail_at=1)
    with pytest.raises(SystemExit, match=r"1 attempt\(s\) failed"):
        run(table_one, monkeypatch, tmp_path, world, fails, *words, "--seeds", "0", "1")
    assert "| LOOP (token) | 1 | 24 | 1200 | 7 | " in capsys.readouterr().out, "with the seed that is there"
    run(table_one, monkeypatch, tmp_path, tmp_path / "nowhere", played, *words, "--table-only")
    assert "| LOOP (token) | 1 | 24 | 1200 | 7 | " in capsys.readouterr().out, "with the seed that is there"
    with pytest.raises(SystemExit, match=r"loop_token, seed 0 is of a budget of 24 rollouts, not 12: take another"):
        run(table_one, monkeypatch, tmp_path, world, played, *words, "--budget", "12")


def test_the_table_in_the_document_is_that_of_the_records(tmp_path, monkeypatch):
    check_tables("table_one", tmp_path, monkeypatch)
