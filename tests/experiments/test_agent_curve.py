"""experiments/agent_curve.py on runs that are known: which curve lies in the spread of seeds, which rollouts agree."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loop_formats.run_files import read_rollouts
from support.experiment_scripts import load_experiment
from support.small_runs import write_logs


@pytest.fixture
def agent_curve():
    return load_experiment("agent_curve")


def write_run(folder: Path, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    lines = [{"iteration": i, "reward": r, "success": r, "steps": 1} for i, r in enumerate(rewards, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def told(agent_curve, monkeypatch, capsys, output, *words):
    monkeypatch.setattr(sys, "argv", ["agent_curve", "--output", str(output), "--iterations", "10", *words])
    agent_curve.main()
    return capsys.readouterr().out


@pytest.mark.parametrize(("rewards", "verdict"), [([0.2] * 5 + [0.55] * 5, "inside"), ([0.2] * 10, "OUTSIDE")])
def test_a_curve_is_inside_where_one_more_seed_would_be(agent_curve, monkeypatch, capsys, tmp_path, rewards, verdict):
    for seed, last in enumerate((0.5, 0.55, 0.6)):
        write_run(tmp_path / f"tiny_cpu-seed{seed}", [0.2] * 5 + [last] * 5)
    write_run(tmp_path / "tiny_cpu_agent-seed0", rewards)
    said = told(agent_curve, monkeypatch, capsys, tmp_path, "--agent-seeds", "0", "--json", str(tmp_path / "rows.json"))
    half = 4.303 * 0.05 * (4 / 3) ** 0.5
    [line] = [line for line in said.splitlines() if line.startswith("| reward_last")]
    assert f"| 0.500 0.550 0.600 | {0.55 - half:.3f} to {0.55 + half:.3f} | {rewards[-1]:.3f} | {verdict} |" in line
    assert "| 10 | 0.500 to 0.600 |" in said
    rows = {(row["case"], row["metric"]): row["value"] for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows["ours_agent tiny", "reward_last"] == rewards[-1]
    assert rows["own_loop tiny", "reward_last"] == 0.55


def test_one_seed_shows_no_spread_and_equal_tokens_are_counted(agent_curve, monkeypatch, capsys, tmp_path):
    for side in ("tiny_cpu", "tiny_cpu_agent"):
        write_run(tmp_path / f"{side}-seed0", [0.5] * 10)
        write_logs(tmp_path / f"{side}-seed0/node/collections", 2, 300)
    log = tmp_path / "tiny_cpu_agent-seed0/node/collections/made-up-i0001.jsonl"
    first, *others = read_rollouts(log)
    other = replace(first, token_ids=[*first.token_ids[:-1], first.token_ids[-1] ^ 1])
    log.write_text("".join(f"{rollout.to_json()}\n" for rollout in (other, *others)))
    said = told(agent_curve, monkeypatch, capsys, tmp_path, "--seeds", "0")
    assert said.count("one seed shows no spread") == 4
    assert "seed 0, rollouts that are the same token for token, by iteration: 1: 11 of 12, 2: 12 of 12" in said
