"""One rank holds the model whole: what it learns and writes is, to the last bit, what FSDP2 on one rank would give."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed.fsdp import FSDPModule

from loop_appworld import LoopAppWorldRecipe
from loop_recipes.engine.batching import BatchLayout, step_batches
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import adapter_parameters, load_base
from loop_recipes.engine.sharding import full_tensors, place_model
from support.families import section
from support.general_models import random_adapter, samples_of
from support.one_rank import sharded_on_one_rank
from support.small_runs import replay_config, set_up
from support.tiny_models import write_random

WAYS = {"whole": nullcontext, "sharded": sharded_on_one_rank}


def files_of(folder):
    """All that a run has written to go on from and to be served."""
    found = [path for name in ("checkpoints", "policies") for path in sorted((folder / name).rglob("*"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.is_file()}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_runs_files_are_those_of_fsdp2_and_each_goes_on_from_the_others(tmp_path, dtype):
    """Adapters, the optimizer's moments, the state and what is published."""
    changes = {"dtype": dtype, "adapter_dtype": "fp32", "sampler_gap": {"ok": 99, "broken": 999}}
    cfg, run = OmegaConf.load(replay_config(tmp_path, iterations=2, **changes)), tmp_path / "run"
    found = []
    for ways in (("whole", "whole"), ("sharded", "sharded"), ("whole", "sharded"), ("sharded", "whole")):
        for way, iterations in zip(ways, (1, 2), strict=True):
            again = {"max_iterations": iterations, "resume_from_checkpoint": iterations > 1}
            with WAYS[way](), set_up(recipe := LoopAppWorldRecipe(OmegaConf.merge(cfg, again))):
                recipe.train()
                assert isinstance(recipe._learner.model, FSDPModule) == (way == "sharded")
        found.append(files_of(run))
        run.rename(tmp_path / "-".join(ways))
    assert len(found[0]) > 10
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert [name for name, data in other.items() if data != found[0][name]] == []


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5_text", "gpt_oss", "granitemoehybrid"])
@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}])
def test_gradients_of_an_adapter_in_float32_are_those_of_fsdp2(kind, options, tmp_path):
    folder, found = write_random(kind, tmp_path), {}
    for way, context in WAYS.items():
        with context():
            of_model = {"model": section(folder, **options), "base_model": str(folder), "checkpointer": None}
            model, base = load_base(SimpleNamespace(**of_model, device="cpu", keep_attention=False), torch.bfloat16)
            adapter = random_adapter(model, seed=1)
            decoder = attach_head(model, TiledLogProbs(16, 32))
            placing = (torch.device("cpu"), torch.bfloat16)
            decoder = place_model(decoder, base, adapter, *placing, activation_checkpointing=True)
            assert isinstance(decoder, FSDPModule) == (way == "sharded")
            torch.manual_seed(0)
            logprobs = []
            for batch in step_batches(samples_of(), BatchLayout(100, packed=True)):
                logprobs.append(decoder(**batch.inputs()).logprobs)
                (logprobs[-1] * batch.old_logprobs).sum().backward()
            gradients = {name: p.grad for name, p in adapter_parameters(decoder).items()}
            found[way] = full_tensors(gradients) | {"logprobs": torch.cat(logprobs).detach()}
            assert len(logprobs) > 1
            assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    whole, sharded = found.values()
    assert whole.keys() == sharded.keys()
    for name, tensor in sharded.items():
        # A mixer is called for each document: FSDP2 adds up the gradients of its calls in half precision, one rank in
        # float32.
        several = any(mixer in name for mixer in getattr(decoder, "mixers", ()))
        apart = float((whole[name] - tensor).abs().max() / tensor.abs().max())
        assert apart <= (2**-7 if several else 0), name
