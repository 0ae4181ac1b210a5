"""A version that the node refuses is not lost: the checkpoint comes first, and a resumed run publishes it again."""

import pytest
import torch
from omegaconf import OmegaConf

import loop_appworld
from loop_appworld import LoopAppWorldRecipe
from loop_recipes.collecting.replay_source import ReplaySource
from loop_recipes.learner.checkpoint import load_latest
from loop_recipes.learner.peft_export import read_adapter
from rollout_server.client import RolloutNodeError
from support.small_runs import replay_config

TOKEN_ENV = "LOOP_TEST_TOKEN"


class Node(ReplaySource):
    """Replays collections; refuses one version, and keeps what it was given of the others."""

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
    cfg.rollout_node = {"url": "http://127.0.0.1:1", "launch": False, "token_env": TOKEN_ENV}
    monkeypatch.setenv(TOKEN_ENV, "unused")

    def train(node, **changes):
        monkeypatch.setattr(loop_appworld, "open_source", lambda *_: node)
        recipe = LoopAppWorldRecipe(OmegaConf.merge(cfg, changes))
        try:
            recipe.setup()
            recipe.train()
        finally:
            recipe.cleanup()

    with pytest.raises(RolloutNodeError, match="the canary differs"):
        train(Node(tmp_path / "logs", refused=1))
    saved = load_latest(tmp_path / "run/checkpoints", critic=False)
    assert saved.state["policy_version"] == 1

    node = Node(tmp_path / "logs")
    train(node, resume_from_checkpoint=True)
    assert list(node.published) == [1, 2], "the version that was refused, and the one after it"
    adapter, canary = node.published[1]
    assert canary == saved.state["canary"]
    assert canary["logprobs"]
    assert adapter.keys() == saved.adapters[1].keys()
    for name, tensor in saved.adapters[1].items():
        assert torch.equal(adapter[name].to(tensor.dtype), tensor), name
