"""The table and picture of benchmarks/algorithms.py, from metrics whose means are known."""

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path

import pytest

from loop_recipes.learner.run_metrics import read_metrics
from loop_recipes.plots.curves import Curve

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"


@pytest.fixture(scope="module")
def algorithms():
    spec = importlib.util.spec_from_file_location("algorithms_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"iteration": i, "reward": reward, "success": reward / 2, "steps": 2, "dataset": "made-up"}
        for i, reward in enumerate(rewards, start=1)
    ]
    lines[-1]["dev_success"] = 0.25
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_means_and_intervals_over_seeds(algorithms, tmp_path):
    gains = [0.1, 0.2, 0.6]
    for seed, gain in enumerate(gains):
        write_run(tmp_path / f"seed{seed}", [0.2] * 5 + [0.9] * 2 + [0.2 + gain] * 5)
    curve = Curve("LOOP", [read_metrics(tmp_path / f"seed{seed}") for seed in range(3)])
    text, rows = algorithms.table({"loop_token": curve})
    half = 4.303 * statistics.stdev(gains) / math.sqrt(3)
    assert f"| 0.300 ± {half:.3f} |" in text
    assert "| LOOP | 3 | 24 ± 0 | 0.200 ± 0.000 | 0.500 ± " in text
    assert text.splitlines()[-1].endswith("| 0.250 ± 0.000 |")
    assert {"case": "ours_loop_token tiny", "metric": "reward_gain", "value": 0.3, "unit": "fraction"} in rows
    assert {row["metric"] for row in rows} == set(algorithms.COLUMNS)


def test_one_seed_has_no_interval(algorithms, tmp_path):
    write_run(tmp_path / "run", [0.5])
    text, _ = algorithms.table({"rloo": Curve("RLOO", [read_metrics(tmp_path / "run")])})
    assert text.splitlines()[-1] == "| RLOO | 1 | 2 | 0.500 | 0.500 | 0.000 | 0.250 | 0.250 |"


def test_complete_runs_are_not_repeated_and_fill_the_document(algorithms, tmp_path, monkeypatch, capsys):
    for name in ("loop_token", "grpo"):
        write_run(tmp_path / f"runs/{name}-seed0", [0.1, 0.3])
    document = tmp_path / "results.md"
    document.write_text(f"# Results\n{algorithms.BEGIN}\nold\n{algorithms.END}\nWhat it says.\n")
    words = f"--output {tmp_path}/runs --only loop_token grpo --seeds 0 --iterations 2 --docs {document}"
    monkeypatch.setattr(sys, "argv", ["algorithms.py", *words.split()])
    algorithms.main()
    content = document.read_text()
    assert "| GRPO | 1 | 4 | 0.200 |" in content
    assert "old" not in content
    assert content.startswith("# Results\n")
    assert content.endswith("What it says.\n")
    assert (tmp_path / "images/algorithms.png").read_bytes().startswith(b"\x89PNG")
    assert "done" not in capsys.readouterr().out


def test_a_table_of_what_is_there_trains_nothing(algorithms, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs/grpo-seed0", [0.1, 0.3])
    monkeypatch.setattr(algorithms, "train", None)
    words = f"--output {tmp_path}/runs --only loop_token grpo --seeds 0 1 --iterations 2 --table-only"
    monkeypatch.setattr(sys, "argv", ["algorithms.py", *words.split()])
    algorithms.main()
    assert "| GRPO | 1 | 4 | 0.200 |" in capsys.readouterr().out


def test_every_row_names_a_config_that_ships(algorithms):
    for algorithm in algorithms.ALGORITHMS.values():
        assert (SCRIPT.parents[1] / "recipes/configs/loop_appworld" / f"{algorithm.config}.yaml").is_file()
