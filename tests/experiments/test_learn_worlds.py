"""experiments/learn_worlds.py: what runs for a world, what a second start repeats, and the table from known results."""

import json
from pathlib import Path

import pytest

from loop_formats.run_files import ADAPTER_FILES
from loop_recipes import steps
from support.experiment_scripts import load_experiment

SOLVED = {"clean": 4, "before": 1, "seed0": 3, "seed1": 4, "shuffled": 1}
"""How many of the four held-out tasks each policy solves."""


@pytest.fixture(scope="module")
def learn_worlds():
    return load_experiment("learn_worlds")


def said(command, key):
    return next((word.removeprefix(f"{key}=") for word in command if word.startswith(f"{key}=")), None)


class Commands:
    """In place of the commands: remembers them, and leaves behind what they would."""

    def __init__(self):
        self.commands = []

    def __call__(self, command, log, deadline_s=None):
        self.commands.append(command)
        out = Path(said(command, "output_dir"))
        if "warm_start_appworld" in command:
            (out / "policy").mkdir(parents=True)
            (out / "policy/config.json").write_text('{"vocab_size": 321}')
        elif "loop_appworld" in command:
            adapter = out / "policies/policy-v0002"
            adapter.mkdir(parents=True)
            for name in ADAPTER_FILES:
                (adapter / name).touch()
            (out / "config.yaml").write_text("max_iterations: 2\n")
            lines = [{"iteration": number, "reward": number / 4} for number in (1, 2)]
            (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            self.evaluation(out, said(command, "policies"))

    @staticmethod
    def evaluation(out, policies):
        results = [
            {
                **{"policy": name, "sampling": sampling, "task_id": f"Level{task}_1", "run": run, "reward": 0.5},
                **{"success": task < solved, "end_reason": "completed", "turns": 5 if task < solved else 1},
            }
            for name, solved in SOLVED.items()
            if f"name: {name}," in policies
            for sampling, runs in (("T=0", 1), ("T=1", 2))
            for run in range(runs)
            for task in range(4)
        ]
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
        (out / "report.json").write_text('{"schema": 2}')


def test_a_world_is_learned_and_scored_once(learn_worlds, monkeypatch, tmp_path, capsys):
    commands, numbers = Commands(), tmp_path / "numbers.json"
    monkeypatch.setattr(steps, "run_step", commands)
    words = ["--output", str(tmp_path / "out"), "--worlds", "babyai", "--seeds", "0", "1", "--iterations", "2"]
    words += ["--json", str(numbers), "--", "optimizer.lr=1e-3"]
    learn_worlds.main(words)
    build, *training, last, clean = commands.commands
    assert "warm_start_appworld/babyai_cpu" in build
    assert said(clean, "policies") == "[{name: clean, adapter: null}]"
    assert said(clean, "node.model.path").endswith("warm_start/cycle-1")
    assert [said(run, "seed") for run in training] == ["0", "1", "0"]
    assert ["advantage=loop_recipes.algorithm.advantages.Shuffled" in run for run in training] == [False, False, True]
    for run in training:
        assert "world=babyai" in run
        assert said(run, "model.path") == said(last, "node.model.path"), "the policy that was built"
        assert said(run, "optimizer.lr") == "1e-3"
    assert said(last, "policies").count("policies/policy-v0002") == 3
    out = capsys.readouterr().out
    assert "| BabyAI | before the habits | 100.0 [50.0, 100.0] | 100.0 [50.0, 100.0] | 5.00 / 5.00 |  |" in out
    assert "| BabyAI | after LOOP, all seeds | 87.5 [" in out
    assert out.count(" | 0.38 / 0.38 |") == 2, "two iterations are both the first and the last three"
    known = {(row["case"], row["metric"]): row["value"] for row in json.loads(numbers.read_text())}
    assert known["ours_loop babyai", "greedy_success"] == 87.5
    assert known["ours_seed0 babyai", "greedy_success"] == 75.0
    assert known["ours_shuffled babyai", "sampled_success"] == 25.0
    assert known["ours_shuffled babyai", "sampled_turns"] == 2.0
    assert (tmp_path / "out/learn_babyai.png").stat().st_size > 0
    learn_worlds.main(words)
    assert len(commands.commands) == 6, "nothing is repeated"
    (tmp_path / "out/babyai/evaluation_clean/report.json").unlink()
    learn_worlds.main([*words[:7], "--table-only"])
    assert "before the habits" not in capsys.readouterr().out.rpartition("| world |")[2]
    assert len(commands.commands) == 6
    with pytest.raises(SystemExit, match="was begun with another overrides"):
        learn_worlds.main([*words, "optimizer.lr=1e-4"])
