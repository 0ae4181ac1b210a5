"""experiments/algorithms.py: the choice of a learning rate, what is repeated, and tables from known metrics."""

import json
import math
import statistics
from pathlib import Path

import pytest

from loop_formats.run_files import ADAPTER_FILES
from loop_recipes import steps
from loop_recipes.config.files import compose
from loop_recipes.paths import loop_package
from support.experiment_scripts import load_experiment, made_up_evaluation, made_up_record


@pytest.fixture(scope="module")
def algorithms():
    return load_experiment("algorithms")


def write_run(folder: Path, rewards: list[float], dev: float = 0.25, rate: str = "1e-3") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"iteration": i, "dataset": "made-up", "reward": reward, "success": reward / 2, "steps": 2}
        for i, reward in enumerate(rewards, 1)
    ]
    lines[-1]["dev_success"] = dev
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = f"model: {{path: {loop_package('tiny_policy')}}}"
    (folder / "config.yaml").write_text(f"max_iterations: {len(rewards)}\noptimizer: {{lr: {rate}}}\n{model}\n")


def said(command, key):
    return next((word.removeprefix(f"{key}=") for word in command if word.startswith(f"{key}=")), None)


class Commands:
    """In place of the commands. ``dev`` says what success on dev a learning rate leads to."""

    def __init__(self, dev):
        self.commands, self.dev = [], dev

    def __call__(self, command, log, deadline_s=None):
        self.commands.append(command)
        out = Path(said(command, "output_dir"))
        if "loop_appworld" in command:
            rate = said(command, "optimizer.lr")
            write_run(out, [0.1, 0.3], self.dev.get(rate, 0.0), rate)
            (out / "policies/policy-v0001").mkdir(parents=True)
            for name in ADAPTER_FILES:
                (out / "policies/policy-v0001" / name).touch()
            return
        made_up_evaluation(out, dict.fromkeys(json.loads(said(command, "tasks")), "loop_token" in out.parent.name))


@pytest.fixture
def world(tmp_path):
    folder = tmp_path / "world/data/datasets"
    folder.mkdir(parents=True)
    (tmp_path / "world/data/tasks").mkdir()
    (folder / "test_normal.txt").write_text("\n".join(f"held{n}_1" for n in range(4)) + "\n")
    (tmp_path / "world/dataset.json").write_text(json.dumps({"name": "made-up"}))
    return tmp_path / "world"


def run(algorithms, monkeypatch, tmp_path, world, commands, *words):
    monkeypatch.setattr(steps, "run_step", commands)
    arguments = ["--output", str(tmp_path / "runs"), "--only", "loop_token", "grpo", "shuffled", "--iterations", "2"]
    root = f"node.environment.root={world}"
    algorithms.main([*arguments, "--seeds", "0", "1", *words, "--", root])


def test_a_rate_is_chosen_on_dev_and_seeds_are_scored_on_held_out_tasks(
    algorithms, monkeypatch, tmp_path, world, capsys
):
    document = tmp_path / "results.md"
    document.write_text("# Results\n<!-- algorithms: begin -->\nold\n<!-- algorithms: end -->\nWhat it says.\n")
    words = ["--docs", str(document), "--ceiling", "0.6"]
    played = Commands({"0.0012": 0.5})
    run(algorithms, monkeypatch, tmp_path, world, played, *words)
    trained = [command for command in played.commands if "loop_appworld" in command]
    searched = [command for command in trained if int(said(command, "seed")) >= 1000]
    tried = [said(command, "optimizer.lr") for command in searched]
    assert tried == ["0.0006", "0.0012", "0.0024"] * 2, "the control has none"
    reported = [command for command in trained if command not in searched]
    assert {said(command, "optimizer.lr") for command in reported} == {"0.0012"}
    assert len(reported) == len(played.commands) - len(trained) == 6, "each is scored"
    content = document.read_text()
    assert "old" not in content
    assert content.startswith("# Results\n")
    assert content.endswith("What it says.\n")
    assert "| GRPO | 2 | 0.0012 | 4 ± 0 | 0.200 ± 0.000 |" in content
    assert "| GRPO against LOOP (token) | T=1 | -100.0 [" in content
    assert "| GRPO | 0.000 / 0.200 | **0.500 / 0.200** | 0.000 / 0.200 |" in content
    assert "![learning curves of the algorithms](images/algorithms_loop_token_grpo_shuffled.png)" in content
    assert (tmp_path / "images/algorithms_loop_token_grpo_shuffled.png").read_bytes().startswith(b"\x89PNG")
    again = Commands({})
    run(algorithms, monkeypatch, tmp_path, world, again, *words)
    assert again.commands == []
    with pytest.raises(SystemExit, match=r"6 run\(s\) failed"):
        run(algorithms, monkeypatch, tmp_path, world, again, "--rate", "0.003")
    assert "was begun with another rate" in capsys.readouterr().out
    elsewhere = ["--output", str(tmp_path / "empty"), "--records", str(tmp_path / "runs/records.jsonl")]
    run(algorithms, monkeypatch, tmp_path, world, again, *words, *elsewhere)
    assert again.commands == [], "records of another machine need no search either"


def lines_of(rewards):
    lines = [{"iteration": i, "reward": r, "success": r / 2, "steps": 2} for i, r in enumerate(rewards, 1)]
    lines[-1]["dev_success"] = 0.25
    return lines


def test_means_and_intervals_over_seeds(algorithms):
    gains = [0.1, 0.2, 0.6]
    rewards = [[0.2] * 5 + [0.9] * 2 + [0.2 + gain] * 5 for gain in gains]
    seeds = [made_up_record("loop_token", seed, lines_of(own), rate=7e-4) for seed, own in enumerate(rewards)]
    text, rows = algorithms.table({"loop_token": seeds})
    half = 4.303 * statistics.stdev(gains) / math.sqrt(3)
    assert f"| 0.300 ± {half:.3f} |" in text
    assert "| LOOP (token) | 3 | 0.0007 | 24 ± 0 | 0.200 ± 0.000 | 0.500 ± " in text
    assert "| 0.250 ± 0.000 | 50.0 [" in text
    assert {"case": "ours_loop_token tiny", "metric": "reward_gain", "value": 0.3, "unit": "fraction"} in rows
    assert {row["metric"] for row in rows} == {*algorithms.COLUMNS, "tgc"}


@pytest.mark.parametrize(("seeds", "quantile"), [(5, 2.776), (11, 2.228), (14, 2.160), (30, 2.045), (80, 1.990)])
def test_the_interval_of_many_seeds_is_students_too(seeds, quantile):
    values = [float(number % 2) for number in range(seeds)]
    _, half = load_experiment("scored_runs").interval(values)
    assert half == pytest.approx(quantile * statistics.stdev(values) / math.sqrt(seeds), rel=2e-3)


def test_one_seed_has_no_interval_and_two_rates_are_not_one(algorithms):
    seeds = [made_up_record("rloo", seed, lines_of([0.5]), rate=rate) for seed, rate in enumerate((1e-3, 2e-3))]
    text, _ = algorithms.table({"rloo": seeds[:1]})
    assert "| RLOO | 1 | 0.001 | 2 | 0.500 | 0.500 | 0.000 | 0.250 | 0.250 | 50.0 [" in text
    assert "| RLOO | 2 | - | " in algorithms.table({"rloo": seeds})[0]


def test_tables_are_made_of_records_alone(algorithms, monkeypatch, tmp_path, capsys):
    """On a machine that has neither the runs nor the world."""
    made_up_record("grpo", 1, lines_of([0.1, 0.3]), rate=7e-4, budget=120).write(tmp_path / "runs/records.jsonl")
    played = Commands({})
    run(algorithms, monkeypatch, tmp_path, tmp_path / "nowhere", played, "--table-only")
    assert played.commands == []
    assert "| GRPO | 1 | 0.0007 | 4 | 0.200 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"grpo, seed 1 is of a budget of 120 rollouts, not 180"):
        run(algorithms, monkeypatch, tmp_path, tmp_path / "nowhere", played, "--table-only", "--iterations", "3")


def test_every_row_names_a_config_that_ships(algorithms):
    for algorithm in algorithms.ALGORITHMS.values():
        compose("tiny_cpu", [algorithm.chosen] if algorithm.chosen else [])
