"""The canary that a new version is published with, as transformers and peft compute it, and the line of a full GPU."""

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_formats.schema import from_mapping
from loop_recipes.config.loop_config import GapConfig
from loop_recipes.engine.diagnostics import CANARY_TOKENS, flops_metrics, gap_metrics, judged_gap, out_of_memory
from loop_recipes.engine.model import meta_model
from loop_recipes.engine.samples import made_up, scored
from loop_recipes.rollouts.replay_source import ReplaySource
from rollout_server.policies.canary import Canary
from support import tiny_models
from support.families import section
from support.random_policy import reference_logprobs
from support.small_runs import replay_config, set_up
from support.texts import texts_beside
from support.tiny_models import write_random

TABLES = texts_beside(__file__)


def test_each_new_version_comes_with_the_log_probs_of_its_own_weights(tmp_path, monkeypatch):
    published = {}
    monkeypatch.setattr(
        ReplaySource, "publish", lambda _, version, folder, canary=None: published.update({version: (folder, canary)})
    )
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    recipe = LoopAppWorldRecipe(cfg)
    with set_up(recipe):
        recipe.train()
    assert published.pop(0)[1] is None, "nothing was sampled yet"
    assert list(published) == [1, 2]
    for folder, data in published.values():
        canary = from_mapping(Canary, data, "canary")
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
    error = torch.OutOfMemoryError("Tried to allocate 20.00 MiB.")
    line = out_of_memory(error, 16384, torch.device("cuda:0"), "collection.limits.max_context")
    assert "peak 3.5 GiB of 80.0, of which CUDA and other programs hold 75.5 (Tried to allocate 20.00 MiB)" in line


BF16 = GapConfig(ok=0.1, broken=0.5)


def _apart(nats):
    """A rollout whose sampled tokens are so many nats from the learner's log-probs."""
    sample = made_up("rollout", 64, 100, torch.Generator().manual_seed(0))
    return [scored(sample, sample.sampler_logprobs - nats)]


@pytest.mark.parametrize(("gap", "base", "verdict"), TABLES["a_gap_of_half_precision_is_compared_with_the_bases_own"])
def test_a_gap_of_half_precision_is_compared_with_the_bases_own(gap, base, verdict):
    found = gap_metrics(_apart(gap - 1e-6), BF16, base)
    assert found["gap_verdict"] == verdict
    assert ("gap_base" in found) == (base is not None)
    if base is not None:
        assert BF16.ok <= found["gap_ok"] <= found["gap_broken"] <= BF16.broken


@pytest.mark.fault("a mixture of experts in half precision is called broken for tokens whose experts change")
@pytest.mark.parametrize(("kind", "half", "share", "base", "verdict"), TABLES["a_mixture_is_judged_by_the_mean"])
def test_a_mixture_is_judged_by_the_mean(kind, half, share, base, verdict, tmp_path):
    judged = judged_gap(_built(kind, tmp_path), half)
    [sample] = _apart(1.3)
    kept = torch.arange(len(sample.old_logprobs)) >= share * len(sample.old_logprobs)
    sample = replace(sample, sampler_logprobs=torch.where(kept, sample.old_logprobs, sample.sampler_logprobs))
    assert gap_metrics([sample], BF16, base, judged)["gap_verdict"] == verdict


def _flops(model, length, shared=0):
    return flops_metrics(model, [(length, shared)], 1.0, 1e-12)["model_flops_utilization"]


def _built(kind, folder, **changes):
    return meta_model(section(write_random(kind, folder, **changes)), torch.float32)


@pytest.mark.parametrize(("kind", "key"), [("qwen3_moe", "num_experts_per_tok"), ("gpt_oss", "num_experts_per_tok")])
def test_flops_of_a_mixture_are_those_of_the_experts_that_a_token_goes_to(kind, key, tmp_path):
    """Two experts more of four: half of what all weights of the experts would be."""
    two, four = (_built(kind, tmp_path / str(chosen), **{key: chosen}) for chosen in (2, 4))
    routed = sum(p.numel() for name, p in four.layers.named_parameters() if ".experts." in name)
    assert _flops(four, 100) - _flops(two, 100) == pytest.approx(4 * 100 * routed / 2)
    assert two.parameters_of_a_token() == sum(p.numel() for p in two.layers.parameters()) - routed / 2


def test_flops_of_attention_are_those_of_what_a_token_looks_at(tmp_path):
    """Within windows, and in layers that have attention."""
    windowed, hybrid = (_built(kind, tmp_path / kind) for kind in ("gemma3_text", "lfm2"))
    assert (windowed.windows(), hybrid.windows()) == ([tiny_models.WINDOW, None], [None])
    width, window = windowed.num_heads * windowed.head_dim, tiny_models.WINDOW
    rest = 4 * windowed.parameters_of_a_token()
    pairs = 100**2 / 2 + (window * 100 - window**2 / 2)
    assert _flops(windowed, 100) == pytest.approx(100 * rest + 12 * width * pairs)
    assert _flops(windowed, 100, 100) == 0
    short = window // 2
    assert _flops(windowed, short) == pytest.approx(short * rest + 12 * width * 2 * short**2 / 2)
    attention = 6 * hybrid.num_heads * hybrid.head_dim * 100**2
    assert _flops(hybrid, 100) == pytest.approx(400 * hybrid.parameters_of_a_token() + attention)
