"""``sft_appworld`` on two ranks beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

from support.ranks import on_ranks
from support.small_runs import sft_config, train_sft_into

RANK_PAIRS = {
    "advantage": {"_component_": "loop_recipes.algorithm.preferences.ReturnPairs", "threshold": 0.3},
    "loss": {"_component_": "loop_recipes.algorithm.preferences.DPO", "beta": 1.0},
    "update": {"minibatch_rollouts": 4, "micro_batch_tokens": 150},
}


def check_two_ranks(folder: Path, changes: dict[str, Any]) -> None:
    """Two ranks have the numbers and the policy of one process."""
    config, one, two = folder / "sft.yaml", folder / "one", folder / "two"
    OmegaConf.save(sft_config(folder, max_iterations=2, **changes), config)
    train_sft_into(config, one)
    on_ranks(2, train_sft_into, config, two)
    runs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two)]
    for expected, found in zip(*runs, strict=True):
        for key in ("loss", "grad_norm", "grad_norm_max"):
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), (found["iteration"], key)
        for key in ("rollouts", "tokens", "steps"):
            assert found[key] == expected[key], key
    adapters = [load_file(run / "policies/policy-v0002/adapter_model.safetensors") for run in (one, two)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        assert adapters[1][name].numpy() == pytest.approx(tensor.numpy(), rel=1e-3, abs=1e-5), name
