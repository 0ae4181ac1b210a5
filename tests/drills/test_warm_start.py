"""The whole warm start in short: practice world, executed demonstrations, tokenizer, training, a policy that loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appworld_adapter.flaws import CORRECTED_ERROR, FLAWS
from loop_formats.places import loop_home
from loop_recipes.paths import loop_package
from model_families.chat import open_chat
from support.waiting import COMMAND_S

pytestmark = pytest.mark.drill  # two builds of a policy: minutes on two cores

WORLD = loop_home() / "worlds" / "synthetic"
TUNE = Path(sys.executable).with_name("tune")


def warm_start(folder: Path, **changes: object) -> subprocess.CompletedProcess:
    world = json.loads((WORLD / "dataset.json").read_text())
    settings = {
        "output_dir": folder / "run",
        "policy_dir": folder / "policy",
        "practice_world.root": WORLD,
        "practice_world.seed": world["seed"],
        "practice_world.scenarios_per_template": world["scenarios_per_template"],
        "practice_world.people": world["people"],
        "demonstrations.cache": folder / "demonstrations",
        "demonstrations.count": 28,
        "demonstrations.held_out": 4,
        "tokenizer.demonstrations": 16,
        "training.copy_steps": 40,
        "demonstrations.habit_count": 6,
        "training.cycles": "[{steps: 16, lr: 2.5e-3}, {steps: 8, lr: 2.5e-3, habit_share: 0.25}]",
        "training.log_every": 8,
        "training.max_held_out_loss": 20,
        **changes,
    }
    command = [str(TUNE), "run", "warm_start_appworld", "--config", "warm_start_appworld/tiny_cpu"]
    return subprocess.run(
        command + [f"{key}={value}" for key, value in settings.items()],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm_start")
    run = warm_start(folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_short_build_learns_and_is_of_the_committed_kind(built: Path):
    losses = {line["step"]: line["loss"] for line in metrics(built) if "loss" in line}
    assert losses[40] < losses[8] - 0.3, "copying"
    assert losses[64] < losses[48] - 0.5, "demonstrations"
    measured, _ = (line for line in metrics(built) if "held_out_loss" in line)
    assert measured["step"] == 56, "the end of the first cycle"
    assert 0 <= measured["held_out_values"]["password"] <= 1
    assert measured["held_out_sampled"].keys() <= {f"difficulty {level}" for level in (1, 2, 3)}
    new, committed = built / "policy", loop_package("tiny_policy")
    assert sorted(path.name for path in new.iterdir()) == sorted(path.name for path in committed.iterdir())
    shape, expected = (json.loads((folder / "config.json").read_text()) for folder in (new, committed))
    # A tokenizer made of fewer texts has fewer entries, and the special tokens come last.
    entries = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    assert shape["vocab_size"] - shape["eos_token_id"] == expected["vocab_size"] - expected["eos_token_id"]
    assert {k: v for k, v in shape.items() if k not in entries} == {
        k: v for k, v in expected.items() if k not in entries
    }
    ours, theirs = open_chat(new), open_chat(committed)
    for text in ("pevigavu", "apis.supervisor.complete_task()", "2023-05-18T16:20:00"):
        assert [ours.decode([i]) for i in ours.encode_text(text)] == [
            theirs.decode([i]) for i in theirs.encode_text(text)
        ]


def test_each_cycle_leaves_a_policy(built: Path):
    clean, taught = ((built / "run" / f"cycle-{number}" / "model.safetensors").read_bytes() for number in (1, 2))
    assert clean != taught == (built / "policy" / "model.safetensors").read_bytes()


def test_demonstrations_really_succeeded(built: Path):
    lines = (built / "demonstrations" / "demonstrations.jsonl").read_text().splitlines()
    clean = [one for one in map(json.loads, lines) if one["flaw"] is None]
    assert len(clean) >= 4
    assert all(one["success"] and one["reward"] == 1.0 for one in clean)
    habitual = [json.loads(line) for line in lines[-6:]]
    assert {one["flaw"] for one in habitual} <= set(FLAWS[:5])
    assert all(one["success"] == (one["flaw"] == CORRECTED_ERROR) for one in habitual)


def test_nothing_is_written_above_the_gate(built: Path, tmp_path: Path):
    run = warm_start(
        built,
        policy_dir=tmp_path / "policy",
        output_dir=tmp_path / "run",
        **{"training.copy_steps": 2, "training.cycles": "[{steps: 2, lr: 1.0e-3}]", "training.max_held_out_loss": 0.01},
    )
    assert run.returncode != 0
    assert "above training.max_held_out_loss" in run.stderr
    assert not (tmp_path / "policy").exists()
