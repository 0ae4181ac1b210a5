"""The layers for CUDA: on a CPU torchtune's own run; their arithmetic, run here, is that of torchtune's."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import MultiHeadAttention, RMSNorm
from torchtune.modules.peft import LoRALinear

from loop_formats.schema import ConfigError
from loop_recipes.engine import cuda_layers
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.cuda_layers import FoldedLoRALinear, PackedAttention
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import meta_model, new_adapter, share_rope_cache
from loop_recipes.engine.sharding import ATTENTION, choose_back_ends, compile_each_layer, place_model
from model_families.base_model import BaseModel
from model_families.decoder.rope import ScaledRope, turns_neighbours
from model_families.decoder.weights import load_weights
from model_families.families.family import Rope
from support.families import ONE_EACH, section, small, write_model
from support.learner_cases import adapter_gradient, flash_attention, make_episodes, make_samples, tiny_lora_model
from support.on_cuda import CountedCalls, as_on_cuda
from support.small_runs import random_adapter

BACKWARD_OF_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def loss_and_gradient(model, batch):
    logprobs = model(**batch.inputs()).logprobs
    (logprobs * batch.old_logprobs).sum().backward()
    gradient = adapter_gradient(model).clone()
    model.zero_grad()
    return logprobs.detach(), gradient


def policy(folder, name):
    """A small model of a published one's proportions with a random adapter, read from its folder."""
    write_model(folder, small(name))
    model = attach_head(meta_model(section(folder), torch.float32), TiledLogProbs())
    base = load_weights(folder, BaseModel.read(folder))
    adapter = random_adapter(new_adapter(model, 0), seed=1, scale=0.2)
    return place_model(model, base, adapter, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ONE_EACH)
def test_packed_padded_and_one_by_one_are_the_same(tmp_path, name):
    samples, model = make_samples([31, 9, 50, 17]), policy(tmp_path, name)
    packed, padded = (loss_and_gradient(model, collate_step(samples, 0, packed=packed)) for packed in (True, False))
    alone = [loss_and_gradient(model, collate_step([sample], 0, packed=False)) for sample in samples]
    one_by_one = torch.cat([logprobs for logprobs, _ in alone]), sum(gradient for _, gradient in alone)
    for found in (padded, one_by_one):
        torch.testing.assert_close(found[0], packed[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(found[1], packed[1], rtol=0, atol=2e-5 * packed[1].abs().max().item())


@pytest.mark.parametrize("name", [None, *ONE_EACH])
def test_the_arithmetic_for_cuda_is_that_of_the_cpu(tmp_path, name):
    batch = collate_step(make_samples([31, 9, 50, 17]), 0, packed=True)
    model = attach_head(tiny_lora_model(True), TiledLogProbs()) if name is None else policy(tmp_path, name)
    expected = loss_and_gradient(model, batch)
    with as_on_cuda(varlen_attn=flash_attention), CountedCalls(torch.ops.loop_recipes.add_product.default) as products:
        found = loss_and_gradient(model, batch)
    # Twice for each linear; the embedding needs no gradient, and so the first layer's q, k and v no gradient of theirs.
    assert products.calls == 14 * len(model.layers) - 3
    tolerance = 2e-6 if name is None else 2e-5
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=tolerance * expected[1].abs().max().item())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_lora_in_its_own_products_is_torchtunes(dtype, tolerance):
    """Output and gradients, in parts of the largest value, against float64; and no worse than torchtune's."""
    torch.manual_seed(0)
    layer = LoRALinear(48, 80, rank=4, alpha=6, use_bias=True)
    layer.lora_b.weight.data.normal_(std=0.3)
    layer.weight.requires_grad_(False), layer.bias.requires_grad_(False)
    x, upstream = torch.randn(2, 33, 48), torch.randn(2, 33, 80)

    def computed(kind, dtype):
        layer.__class__ = kind
        own = deepcopy(layer).to(dtype)
        rows = x.to(dtype, copy=True).requires_grad_()
        out = own(rows)
        out.backward(upstream.to(dtype))
        return [value.double() for value in (out, rows.grad, own.lora_a.weight.grad, own.lora_b.weight.grad)]

    def errors(found):
        return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True)]

    layer.to(dtype)  # the same weights for all
    x, upstream = x.to(dtype), upstream.to(dtype)
    exact = computed(LoRALinear, torch.float64)
    theirs = errors(computed(LoRALinear, dtype))
    with as_on_cuda():
        ours = errors(computed(FoldedLoRALinear, dtype))
    assert max(ours) < tolerance
    assert all(a <= 1.2 * b + 1e-7 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_lora_with_dropout_is_torchtunes_own():
    layer = LoRALinear(8, 8, rank=2, alpha=4, dropout=0.5)
    layer.__class__ = FoldedLoRALinear
    with as_on_cuda(), CountedCalls(torch.ops.loop_recipes.add_product.default) as products:
        layer(torch.randn(3, 8))
    assert products.calls == 0


@pytest.mark.parametrize("rope", [None, Rope(1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 16})])
def test_heads_are_rotated_as_torchtune_rotates_them(rope):
    theirs = Qwen2RotaryPositionalEmbeddings(16, 64) if rope is None else ScaledRope(rope, 16, 64)
    ours = deepcopy(theirs)
    ours.__class__ = cuda_layers.CUDA_LAYERS[type(theirs)]
    positions, found = torch.cat((torch.arange(40), torch.arange(23)))[None], {}
    generator = torch.Generator().manual_seed(0)
    values, upstream = (torch.randn(1, 63, 3, 16, generator=generator) for _ in range(2))
    for called, module in (("theirs", theirs), ("ours", ours)):
        x = values.clone().requires_grad_()
        with as_on_cuda():
            out = module(x, input_pos=positions)
        out.backward(upstream)
        found[called] = torch.stack((out.detach(), x.grad))
    torch.testing.assert_close(found["ours"], found["theirs"], rtol=0, atol=1e-6)
    assert not turns_neighbours(ours)


NEWEST = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 has a varlen_attn without windows")


@NEWEST
def test_an_older_torch_is_named_once_and_packed_rows_go_the_other_way(monkeypatch):
    assert cuda_layers.VARLEN
    monkeypatch.setattr(cuda_layers, "VARLEN", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = attach_head(tiny_lora_model(True), TiledLogProbs())
    with pytest.raises(ConfigError, match=r"compile: torch .* give false, or torch 2\.13"):
        place_model(model, {}, {}, torch.device("cuda"), torch.bfloat16, compile_layers=True)
    with pytest.warns(UserWarning, match="varlen_attn takes no window_size or enable_gqa") as said:
        choose_back_ends("fa2", model, torch.device("cpu"), torch.float32)
    assert len(said) == 1
    batch = collate_step(make_samples([31, 9]), 0, packed=True)
    monkeypatch.setattr(PackedAttention, "packed", None)
    assert loss_and_gradient(model, batch)[0].isfinite().all()


def test_an_attention_of_another_kind_is_refused(tmp_path):
    """It would compute by itself on a CPU, and not see that a row is packed or be slow on CUDA."""

    class Another(MultiHeadAttention):
        pass

    model = tiny_lora_model(True)
    model.layers[1].attn.__class__ = Another
    with pytest.raises(ConfigError, match="model: its attention is Another, for which packed rows are not implemented"):
        attach_head(model, TiledLogProbs())
    model = tiny_lora_model(True)
    model.layers[1].attn.q_norm = RMSNorm(8)
    with pytest.raises(ConfigError, match="model: its attention is MultiHeadAttention, for which"):
        attach_head(model, TiledLogProbs())


@torch.library.custom_op("tests::varlen", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, seen: Tensor, longest: int) -> Tensor:
    """As torch's own is to a compiler: an operator that it cannot see into."""
    return flash_attention(q, k, v, borders, seen, longest, longest, (-1, 0), True)


@varlen.register_fake
def _(q, k, v, borders, seen, longest):
    return torch.empty_like(q)


@NEWEST
def test_any_packing_is_compiled_into_three_graphs_and_three_where_sequences_begin_alike():
    """Without gradient, with it, and of the first layer, whose input has none; all other layers share theirs."""
    varlen.register_autograd(lambda ctx, gradient: (gradient, *[None] * 5))

    def opaque(q, k, v, borders, seen, longest, __, **options):
        return varlen(q, k, v, borders, seen, longest)

    model = attach_head(tiny_lora_model(True), TiledLogProbs())
    share_rope_cache(model)
    counter = CompileCounter()
    compile_each_layer(model, counter)
    packings = [[31, 9], [50], [17, 8, 40], [12, 12, 12, 12], [60, 3], [9, 9, 9, 9, 9], [44], [5, 6, 7, 8, 9, 10]]
    counts = []
    alike = [make_episodes(turns) for turns in ([3], [2, 4], [5, 1], [2, 2, 2])]
    for samples in [*map(make_samples, packings), *alike]:
        batch = collate_step(samples, 0, packed=True)
        with as_on_cuda(varlen_attn=opaque):
            with torch.no_grad():
                model(**batch.inputs())
            model(**batch.inputs()).logprobs.sum().backward()
        counts.append(counter.frame_count)
    assert counts == [3] * len(packings) + [6] * len(alike)


# What stands for varlen_attn is none of the operators that are kept, so of it all is computed again.
@pytest.mark.parametrize(("layers", "pieces"), [("torchtune's", 6), pytest.param("for CUDA", 0, marks=NEWEST)])
def test_attention_that_is_kept_is_not_computed_again(layers, pieces):
    samples, found = make_samples([31, 9, 50]), {}
    for keep in (None, False, True):
        model = tiny_lora_model(True)
        base = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
        adapter = random_adapter(new_adapter(model, 0), seed=1, scale=0.2)
        model = attach_head(tiny_lora_model(True).to("meta"), TiledLogProbs())
        checkpointing = {"activation_checkpointing": keep is not None, "keep_attention": bool(keep)}
        model = place_model(model, base, adapter, torch.device("cpu"), torch.float32, **checkpointing)
        counted = CountedCalls(*ATTENTION), CountedCalls(BACKWARD_OF_ATTENTION)
        kind = nullcontext() if layers == "torchtune's" else as_on_cuda(varlen_attn=flash_attention)
        with kind, counted[0] as forward, counted[1] as backward:
            logprobs, gradient = loss_and_gradient(model, collate_step(samples, 0, packed=True))
        found[keep] = logprobs, gradient, forward.calls, backward.calls
    assert [found[keep][2:] for keep in found] == [(pieces, pieces), (2 * pieces, pieces), (pieces, pieces)]
    for keep in (False, True):
        assert torch.equal(found[keep][0], found[None][0])
        assert torch.equal(found[keep][1], found[None][1])
