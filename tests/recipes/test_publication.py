"""What a run leaves behind when it ends before its time: a version that was refused, a file that asked it to stop."""

import json
import sys

import pytest
import torch
from omegaconf import OmegaConf

import loop_appworld
from loop_recipes.engine.checkpoint import load_latest
from loop_recipes.engine.peft_export import read_adapter
from loop_recipes.run.stop_request import StopRequested
from model_families.weights.weight_names import peft_name
from rollout_server.client import RolloutNodeError
from support.fake_node import FakeNode
from support.small_runs import on_source, replay_config, train


class Node(FakeNode):
    """Refuses one version, and keeps what it was given of the others."""

    def __init__(self, logs, refused=None):
        super().__init__(logs)
        self.refused = refused
        self.published = {}

    def publish(self, version, folder, canary=None):
        if version == self.refused:
            raise RolloutNodeError(422, "the canary differs")
        self.published[version] = (read_adapter(folder)[0], canary)


def test_a_resumed_run_publishes_what_was_saved(tmp_path, monkeypatch):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))

    def train_on(node, **changes):
        on_source(monkeypatch, cfg, node)
        train(OmegaConf.merge(cfg, changes))

    with pytest.raises(RolloutNodeError, match="the canary differs"):
        train_on(Node(tmp_path / "logs", refused=1))
    saved = load_latest(tmp_path / "run/checkpoints")
    assert saved.state["policy_version"] == 1

    node = Node(tmp_path / "logs")
    train_on(node, resume_from_checkpoint=True, sampler_gap={"ok": 0.3, "broken": 2.0})
    assert list(node.published) == [1, 2], "the version that was refused, and the one after it"
    adapter, canary = node.published[1]
    tolerances = {"tolerance": 2.0, "mean_tolerance": 0.3}
    assert canary == saved.state["canary"] | tolerances, "those of the config that it is resumed with"
    assert canary["logprobs"]
    assert adapter.keys() == set(map(peft_name, saved.adapters[1]))
    for name, tensor in saved.adapters[1].items():
        assert torch.equal(adapter[peft_name(name)].to(tensor.dtype), tensor), name


def test_a_gap_that_is_broken_ends_the_run_after_its_update_is_saved(tmp_path, monkeypatch):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    on_source(monkeypatch, cfg, Node(tmp_path / "logs"))
    cfg.sampler_gap = {"ok": 1e-9, "broken": 1e-8}
    train(cfg)
    assert load_latest(tmp_path / "run/checkpoints").state["iteration"] == 1
    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["gap_verdict"] == "broken"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_resumed_run_in_half_precision_compares_its_gap_with_that_of_its_first_iteration(tmp_path, dtype):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    cfg.dtype, cfg.sampler_gap = dtype, {"ok": 1e-3, "broken": 100.0}
    train(OmegaConf.merge(cfg, {"max_iterations": 1}))
    train(OmegaConf.merge(cfg, {"resume_from_checkpoint": True}))
    first, second = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert "gap_base" not in first
    if dtype == "fp32":
        assert "gap_base" not in second
    else:
        assert second["gap_base"] == first["gap_p99"]
        assert second["gap_ok"] == max(1e-3, 2 * first["gap_p99"])


def test_a_stop_file_that_is_there_at_the_start_stops_one_start_only(tmp_path, monkeypatch, capsys):
    class Starting(Node):
        def wait_ready(self):
            raise StopRequested

    file = replay_config(tmp_path, iterations=1)
    monkeypatch.setattr(loop_appworld, "open_source", lambda *_: Starting(tmp_path / "logs"))
    monkeypatch.setattr(sys, "argv", ["loop_appworld", "--config", str(file)])
    stop = tmp_path / "run/stop"
    stop.parent.mkdir()
    stop.touch()
    assert loop_appworld.recipe_main() == 0
    assert "stopped while waiting for the rollout node" in capsys.readouterr().err
    assert not stop.exists()
