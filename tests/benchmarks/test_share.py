"""benchmarks/share.py to its end on a CPU, with a scripted server, so that its first GPU finds no typo."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from rollout_server.inference import command, server_group
from rollout_server.inference import server as vllm_server
from support import fake_vllm

FOLDER = Path(__file__).parents[2] / "benchmarks"
SIZES = ["--turns", "2", "--canary", "16", "--tokens", "64", "--requests", "2", "--prompt", "8", "--sampled", "4"]
TURN = {f"{step}_seconds" for step in ("sleep", "come", "update", "leave", "wake", "sample", "turn")}
SPEED = {"trained_tokens_per_s", "sampled_tokens_per_s"}


@pytest.fixture
def share(monkeypatch, tmp_path):
    """Run the benchmark; returns its rows by case and metric."""
    monkeypatch.syspath_prepend(str(FOLDER))
    fake = [sys.executable, fake_vllm.__file__, "--port"]
    monkeypatch.setattr(vllm_server, "server_command", lambda model, servers, port, *, cpu: [*fake, str(port)])
    for module in (vllm_server, server_group):
        monkeypatch.setattr(module, "installed_vllm", lambda: command.Vllm("0.32.0", cpu=False))

    def run(*words):
        file = tmp_path / "rows.json"
        monkeypatch.setattr(sys, "argv", ["share.py", "--config", "tiny_cpu", "--json", str(file), *SIZES, *words])
        runpy.run_path(str(FOLDER / "share.py"), run_name="__main__")
        found: dict[str, dict[str, float]] = {}
        for row in json.loads(file.read_text()):
            case = row["case"].removeprefix("tiny_cpu ").removesuffix(", CPU")
            assert row["metric"] not in found.setdefault(case, {})
            found[case][row["metric"]] = row["value"]
            assert row["unit"] in ("s", "GiB", "tokens/s", "nats")
        return found

    return run


def test_a_device_in_turns_and_divided_is_measured_in_one_run(share):
    rows = share()
    assert list(rows) == ["in turns, start", "in turns, turn 0", "in turns, turn 1", "divided, start", "divided"]
    for turn in ("in turns, turn 0", "in turns, turn 1"):
        assert rows[turn].keys() == TURN | SPEED | {"gap"}
        assert rows[turn]["gap"] == 0
        assert rows[turn]["turn_seconds"] >= rows[turn]["update_seconds"] + rows[turn]["sample_seconds"]
    assert rows["divided"].keys() == {"update_seconds", "sample_seconds", "turn_seconds"} | SPEED
    assert all(value > 0 for row in rows.values() for metric, value in row.items() if metric != "gap")


def test_without_words_for_a_divided_device_only_turns_are_measured(share):
    assert list(share("--divided")) == ["in turns, start", "in turns, turn 0", "in turns, turn 1"]
