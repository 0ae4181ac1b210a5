"""experiments/learn_worlds.py: the table of docs/results/worlds.md, from results and metrics that are known."""

import json

from support.experiment_scripts import load_experiment

SOLVED = {"clean": 4, "before": 1, "seed0": 3, "seed1": 4, "shuffled": 1}
"""How many of the four held-out tasks each policy solves."""


def evaluation(folder, policies):
    results = [
        {
            **{"policy": name, "sampling": sampling, "task_id": f"Level{task}_1", "run": run, "reward": 0.5},
            **{"success": task < SOLVED[name], "end_reason": "completed", "turns": 5 if task < SOLVED[name] else 1},
        }
        for name in policies
        for sampling, runs in (("T=0", 1), ("T=1", 2))
        for run in range(runs)
        for task in range(4)
    ]
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    (folder / "report.json").write_text('{"schema": 2}')


def test_success_of_all_seeds_and_of_each_stands_in_the_table(tmp_path, capsys):
    clean, *after = SOLVED
    world = tmp_path / "out/babyai"
    evaluation(world / "evaluation_clean", [clean])
    evaluation(world / "evaluation_after", after)
    for run in ("seed0", "seed1", "shuffled"):
        (world / run).mkdir()
        lines = [{"iteration": number, "reward": number / 4} for number in (1, 2)]
        (world / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--output", str(tmp_path / "out"), "--worlds", "babyai", "--seeds", "0", "1", "--iterations", "2"]
    load_experiment("learn_worlds").main([*words, "--json", str(tmp_path / "numbers.json"), "--table-only"])
    out = capsys.readouterr().out
    assert "| BabyAI | before the habits | 100.0 [50.0, 100.0] | 100.0 [50.0, 100.0] | 5.00 / 5.00 |  |" in out
    assert "| BabyAI | after LOOP, all seeds | 87.5 [" in out
    assert out.count(" | 0.38 / 0.38 |") == 2, "two iterations are both the first and the last three"
    rows = json.loads((tmp_path / "numbers.json").read_text())
    known = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert known["ours_loop babyai", "greedy_success"] == 87.5
    assert known["ours_seed0 babyai", "greedy_success"] == 75.0
    assert known["ours_shuffled babyai", "sampled_success"] == 25.0
    assert known["ours_shuffled babyai", "sampled_turns"] == 2.0
