"""What a model keeps between forward and backward; tests/integration/test_learner_ranks.py has its shards."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from loop_recipes.engine import sharding
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import new_adapter
from loop_recipes.engine.sharding import place_model
from support.general_models import adapted
from support.learner_cases import adapter_gradient, flash_attention, make_episodes, make_samples, tiny_lora_model
from support.on_cuda import as_on_cuda
from support.small_runs import random_adapter
from support.tiny_models import write_random


def placed(**kept):
    """A small model with an adapter, placed with these arguments."""
    model = tiny_lora_model(True)
    base = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    adapter = random_adapter(new_adapter(model, 0), seed=1, scale=0.2)
    model = attach_head(model.to("meta"), TiledLogProbs())
    return place_model(model, base, adapter, torch.device("cpu"), torch.float32, **kept)


@pytest.mark.fault("cuDNN computes attention of models that transformers builds, by a plan for each new shape")
@pytest.mark.parametrize("kind", ["of torchtune", "deepseek_v3", "smollm3"])
def test_cudnn_computes_no_attention_of_either_decoder(kind, tmp_path):
    torch.backends.cuda.enable_cudnn_sdp(True)
    placed() if kind == "of torchtune" else adapted(write_random(kind, tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def results(model, batch):
    logprobs = model(**batch.inputs()).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), adapter_gradient(model)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_whatever_is_kept_of_sequences_that_begin_alike_changes_nothing(on_cuda):
    batch = collate_step(make_episodes([4, 2]), 0, packed=True)
    found = []
    with as_on_cuda(varlen_attn=flash_attention) if on_cuda else nullcontext():
        for kept in ((), ("activation_checkpointing",), ("activation_checkpointing", "keep_attention")):
            found.append(results(placed(**dict.fromkeys(kept, True)), batch))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


def test_the_inputs_of_checkpointed_layers_and_nothing_else_wait_on_the_host():
    batch = collate_step(make_samples([31, 9, 50]), 0, packed=True)
    moved, found = [], {}

    class Host(saved_tensors_hooks):
        def __init__(self, pin_memory):
            assert not pin_memory, "memory is pinned for a GPU"
            super().__init__(lambda tensor: moved.append(tensor) or tensor.clone(), lambda tensor: tensor)

    with mock.patch.object(sharding, "save_on_cpu", Host):
        for offloading in (False, True):
            model = placed(activation_checkpointing=True, activation_offloading=offloading)
            found[offloading] = results(model, batch)
    assert [tensor.shape for tensor in moved if tensor.numel()] == [(1, 90, 32)] * 2
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)
