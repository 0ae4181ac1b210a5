"""The canary that a new version is published with, as transformers and peft compute it, and the line of a full GPU."""

import pytest
import torch
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_recipes.engine.diagnostics import CANARY_TOKENS, out_of_memory
from loop_recipes.rollouts.replay_source import ReplaySource
from rollout_server.policies.canary import Canary
from support.random_policy import reference_logprobs
from support.small_runs import replay_config


def test_each_new_version_comes_with_the_log_probs_of_its_own_weights(tmp_path, monkeypatch):
    published = {}
    monkeypatch.setattr(
        ReplaySource, "publish", lambda _, version, folder, canary=None: published.update({version: (folder, canary)})
    )
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    recipe = LoopAppWorldRecipe(cfg)
    recipe.setup()
    recipe.train()
    recipe.cleanup()
    assert published.pop(0)[1] is None, "nothing was sampled yet"
    assert list(published) == [1, 2]
    for folder, data in published.values():
        canary = Canary.from_dict(data, max_context=512)
        assert 1 < len(canary.positions) <= CANARY_TOKENS
        expected = reference_logprobs(tmp_path / "base", folder, canary.token_ids)
        for position, logprob in zip(canary.positions, canary.logprobs, strict=True):
            assert logprob == pytest.approx(expected[position], abs=1e-4)
    (first, _), (_, second) = published.values()
    stale = reference_logprobs(tmp_path / "base", first, second["token_ids"])
    gaps = [abs(stale[i] - logprob) for i, logprob in zip(second["positions"], second["logprobs"], strict=True)]
    assert max(gaps) > 1e-3, "the version before would pass for it"


def test_a_gpu_that_is_full_of_others_memory_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**29, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3.5 * 2**30)
    line = out_of_memory(torch.OutOfMemoryError("Tried to allocate 20.00 MiB."), 16384, torch.device("cuda:0"))
    assert "peak 3.5 GiB of 80.0, of which CUDA and other programs hold 75.5 (Tried to allocate 20.00 MiB)" in line
