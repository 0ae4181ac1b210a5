"""A policy learns only from the ids of its own model; those of another are refused by name, before an update."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from loop_appworld import LoopAppWorldRecipe
from loop_formats.schema import ConfigError
from loop_recipes.rollouts.source import NoRollouts
from sft_appworld import SftAppWorldRecipe
from support.counter_node import TOKEN, local_node
from support.small_runs import config_over, replay_config, sft_config, train, write_logs
from support.waiting import DEADLINE_S

TOKEN_ENV = "LOOP_TEST_TOKEN"
EMBEDDING = "model.embed_tokens.weight"


def with_more_ids(policy, folder):
    """A policy like that in ``policy``, whose model knows eight ids more; returns how many."""
    shutil.copytree(policy / "model", folder / "model")
    file = folder / "model/model.safetensors"
    weights = load_file(file)
    weights[EMBEDDING] = torch.cat([weights[EMBEDDING], weights[EMBEDDING][:8]])
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "model/config.json").read_text())
    config["vocab_size"] += 8
    (folder / "model/config.json").write_text(json.dumps(config))
    return config["vocab_size"]


async def test_a_node_whose_model_has_another_vocabulary_is_refused_before_anything_is_sampled(
    policy, tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    served = with_more_ids(policy, tmp_path / "larger")
    async with local_node(tmp_path / "larger", tmp_path / "node", publish=False) as local:
        recipe = LoopAppWorldRecipe(OmegaConf.load(config_over(local.url, policy, tmp_path, TOKEN_ENV, DEADLINE_S)))
        recipe._stop.listen = lambda: None  # signals are for main threads
        said = rf"{local.url} serves a model with a vocabulary of {served} .* has one of {served - 8}; give"
        with pytest.raises(NoRollouts, match=said):
            await local.call(recipe.setup)
        recipe.cleanup()
        assert not local.vllm.requests


def test_stored_rollouts_of_another_model_are_refused_before_the_first_update(tmp_path):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    known = cfg.model.vocab_size
    cfg.rollout_node.replay = str(write_logs(tmp_path / "another", 1, 10 * known))
    said = rf"rollout_node.replay: \S+\.jsonl:\d+: rollout .* token_ids\[\d+\] is \d+, and .* to {known - 1}; name"
    with pytest.raises(ConfigError, match=said):
        train(cfg)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_fixed_set_of_another_model_is_refused(tmp_path):
    cfg = sft_config(tmp_path)
    write_logs(tmp_path / "collections", 2, 10 * cfg.model.vocab_size)
    recipe = SftAppWorldRecipe(cfg)
    with pytest.raises(ConfigError, match=r"rollouts\.logs: \S+\.jsonl:\d+: rollout .* token_ids\[\d+\] is \d+, and"):
        recipe.setup()
    recipe.cleanup()
