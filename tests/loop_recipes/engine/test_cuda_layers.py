"""The layers for CUDA: on a CPU torchtune's own run; their arithmetic, run here, is that of torchtune's."""

import pytest
import torch
import torch.nn.functional as F

from loop_recipes.engine import cuda_layers
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.cuda_layers import FoldedLoRALinear, FusedRMSNorm, PackedAttention
from loop_recipes.engine.logprobs import TiledLogProbs, attach_head
from support.learner_cases import adapter_gradient, make_samples, tiny_lora_model


def loss_and_gradient(model, batch):
    logprobs = model(**batch.inputs()).logprobs
    (logprobs * batch.old_logprobs).sum().backward()
    gradient = adapter_gradient(model).clone()
    model.zero_grad()
    return logprobs.detach(), gradient


def flash_attention(q, k, v, borders, _, longest, __, window_size, enable_gqa):
    """What varlen_attn computes, [s, h, d] each: every document causally, keys shared by groups of query heads."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert borders.dtype == torch.int32
    assert longest == borders.diff().max()
    pieces = zip(*(x.transpose(0, 1).split(borders.diff().tolist(), dim=1) for x in (q, k, v)), strict=True)
    done = [F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
    return torch.cat(done, dim=1).transpose(0, 1)


def test_the_arithmetic_is_torchtunes(monkeypatch):
    batch = collate_step(make_samples([31, 9, 50, 17]), 0, packed=True)
    model = attach_head(tiny_lora_model(True), TiledLogProbs())
    expected = loss_and_gradient(model, batch)
    called = []

    def packed(self, x, y=None, *, mask, input_pos):
        called.append("attention")
        return self.packed(x, mask, input_pos)

    def folded(self, x):
        called.append("lora")
        return self.folded(x)

    monkeypatch.setattr(cuda_layers, "varlen_attn", flash_attention)
    monkeypatch.setattr(PackedAttention, "forward", packed)
    monkeypatch.setattr(FoldedLoRALinear, "forward", folded)
    found = loss_and_gradient(model, batch)
    assert set(called) == {"attention", "lora"}
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=2e-6 * expected[1].abs().max().item())


def test_an_older_torch_is_named_once_and_packed_rows_go_the_other_way(monkeypatch):
    assert cuda_layers.VARLEN, "the locked torch has all of it"
    monkeypatch.setattr(cuda_layers, "VARLEN", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="varlen_attn takes no window_size or enable_gqa") as said:
        model = attach_head(tiny_lora_model(True), TiledLogProbs())
    assert len(said) == 1
    batch = collate_step(make_samples([31, 9]), 0, packed=True)
    monkeypatch.setattr(PackedAttention, "packed", None)
    assert loss_and_gradient(model, batch)[0].isfinite().all()


def test_every_layer_of_a_decoder_is_ours():
    model = attach_head(tiny_lora_model(True), TiledLogProbs())
    kinds = [type(module) for module in model.modules()]
    layers = len(model.layers)
    assert kinds.count(PackedAttention) == layers
    assert kinds.count(FoldedLoRALinear) == 7 * layers
    assert kinds.count(FusedRMSNorm) == 2 * layers + 1
