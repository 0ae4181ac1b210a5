"""What a model keeps between forward and backward; tests/integration/test_learner_ranks.py has its shards."""

from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks

from loop_recipes.engine import sharding
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.logprobs import TiledLogProbs, attach_head
from loop_recipes.engine.model import new_adapter
from loop_recipes.engine.sharding import place_model
from support.learner_cases import adapter_gradient, make_samples, tiny_lora_model
from support.small_runs import random_adapter


def test_the_inputs_of_checkpointed_layers_and_nothing_else_wait_on_the_host():
    batch = collate_step(make_samples([31, 9, 50]), 0, packed=True)
    moved, found = [], {}

    class Host(saved_tensors_hooks):
        def __init__(self, pin_memory):
            assert not pin_memory, "memory is pinned for a GPU"
            super().__init__(lambda tensor: moved.append(tensor.shape) or tensor.clone(), lambda tensor: tensor)

    with mock.patch.object(sharding, "save_on_cpu", Host):
        for offloading in (False, True):
            model = tiny_lora_model(True)
            base = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
            adapter = random_adapter(new_adapter(model, 0), seed=1, scale=0.2)
            model = place_model(
                attach_head(tiny_lora_model(True).to("meta"), TiledLogProbs()),
                base,
                adapter,
                torch.device("cpu"),
                torch.float32,
                activation_checkpointing=True,
                activation_offloading=offloading,
            )
            logprobs = model(**batch.inputs()).logprobs
            logprobs.sum().backward()
            found[offloading] = logprobs.detach(), adapter_gradient(model)
    assert moved == [(1, 90, 32)] * 2
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)
