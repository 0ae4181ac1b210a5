"""Runs of ``sft_appworld`` in this process, on the set of :func:`support.small_runs.sft_config`, and their deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from sft_appworld import SftAppWorldRecipe
from support.deaths import Killed, deterministic, train_until
from support.small_runs import sft_config

PAIRS = {
    "advantage": {"_component_": "loop_recipes.algorithm.preferences.ReturnPairs", "threshold": 0.3},
    "loss": {"_component_": "loop_recipes.algorithm.preferences.DPO", "beta": 1.0},
}
STEP = {"minibatch_rollouts": None, "micro_batch_tokens": 150}
STEPS = {"minibatch_rollouts": 3, "micro_batch_tokens": 150}


def train(cfg: DictConfig, *overrides: str, die_at_step: int | None = None) -> list[dict]:
    """The recipe in this process; returns its metrics. ``die_at_step`` ends it in place of that optimizer step."""
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))
    train_until(SftAppWorldRecipe(cfg), die_at_step)
    return deterministic(Path(cfg.output_dir, "metrics.jsonl"))


def check_resumed(folder: Path, changes: dict[str, Any]) -> None:
    """A run that died in the middle of its second iteration, and was resumed, equals one that never stopped."""
    cfg = sft_config(folder, **changes)
    whole = train(cfg, f"output_dir={folder / 'whole'}")
    steps = whole[0]["steps"]
    assert steps > 1
    with pytest.raises(Killed):
        train(cfg, f"output_dir={folder / 'broken'}", die_at_step=2 * steps)
    assert train(cfg, f"output_dir={folder / 'broken'}", "resume_from_checkpoint=True") == whole
    for file in sorted((folder / "whole/checkpoints/iteration_0003").glob("*.safetensors")):
        other = folder / "broken/checkpoints/iteration_0003" / file.name
        assert file.read_bytes() == other.read_bytes(), file.name
