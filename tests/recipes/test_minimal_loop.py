"""The page that everyone reads trains as the recipe does."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

import minimal_loop
from loop_formats.run_files import read_rollouts
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.model import adapter_parameters
from model_families.weights.weight_names import peft_name
from support.small_runs import replay_config, train


@pytest.mark.parametrize(("epochs", "minibatch", "steps"), [(1, 12, 1), (2, 4, 4)], ids=["first step", "iteration"])
def test_its_update_is_the_recipes(tmp_path, monkeypatch, epochs, minibatch, steps):
    update = {"epochs": epochs, "minibatch_rollouts": minibatch, "micro_batch_tokens": 150, "clip_grad_norm": 1.0}
    update["min_abs_advantage"] = minimal_loop.SIGNAL
    config = OmegaConf.load(replay_config(tmp_path, iterations=1, update=update))
    train(config)
    [line] = [json.loads(text) for text in Path(config.output_dir, "metrics.jsonl").read_text().splitlines()]
    trained = load_file(Path(config.output_dir, "policies/policy-v0001/adapter_model.safetensors"))

    monkeypatch.setattr(minimal_loop, "EPOCHS", epochs)
    monkeypatch.setattr(minimal_loop, "MINIBATCH", minibatch)
    policy = minimal_loop.load_policy(read_config(config, LoopConfig))
    parameters = adapter_parameters(policy)
    optimizer = torch.optim.AdamW(parameters.values(), lr=line["learning_rate"], betas=(0.9, 0.99), weight_decay=0.0)
    [log] = (tmp_path / "logs").glob("*.jsonl")
    fresh = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    taken = minimal_loop.improve(policy, optimizer, read_rollouts(log), iteration=1)

    assert taken == line["steps"] == steps
    moved = [name for name, parameter in parameters.items() if not torch.equal(parameter, fresh[name])]
    assert len(moved) == len(parameters) if steps > 1 else all("lora_b" in name for name in moved)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), trained[peft_name(name)], rtol=1e-3, atol=1e-6)
