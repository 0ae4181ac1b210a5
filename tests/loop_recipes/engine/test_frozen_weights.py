"""Frozen weights leave for the host and come back as they were, whole or in parts."""

import pytest
import torch

from loop_recipes.engine.frozen_weights import FrozenWeights
from support.loading_ranks import leave_and_come
from support.ranks import on_ranks


def test_weights_that_left_come_as_they_were():
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)).requires_grad_(False)
    shared = torch.arange(40.0)
    model[0].weight.data, model[1].weight.data = shared[:15].view(3, 5), shared[15:21].view(2, 3)  # of one storage
    model[1].bias.requires_grad_(True)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    frozen, view = FrozenWeights(model), model[0].bias[1:]
    for _ in range(3):
        frozen.to_host()
        frozen.to_host()
        assert model[0].weight.untyped_storage().nbytes() == model[0].bias.untyped_storage().nbytes() == 0
        assert torch.equal(model[1].bias, before["1.bias"]), "what is trained stays"
        frozen.to_device()
        frozen.to_device()
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert torch.equal(view, before["0.bias"][1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_has_its_part_on_the_host_and_computes_the_same_when_it_is_back(dtype):
    found = on_ranks(2, leave_and_come, dtype)
    assert found["computed"] == [found["computed"][0]] * 3
    assert found["bytes"][0] > 0
    assert found["bytes"] == [found["bytes"][0], 0] * 3
