"""A base in four bits: the learner computes what it does with the same weights written out, and keeps none whole."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torchtune.modules.peft import disable_adapter

from loop_formats.schema import ConfigError
from loop_recipes.engine import packed_weights
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.diagnostics import training_flops
from loop_recipes.engine.frozen_weights import FrozenWeights
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import check_shapes, meta_model, new_adapter
from loop_recipes.engine.sharding import compile_each_layer, place_model
from model_families.base_model import BaseModel
from model_families.decoder.weights import load_weights
from support import four_bits
from support.families import ONE_EACH, section
from support.four_bits import random_four_bits
from support.learner_cases import adapter_gradient, make_samples
from support.small_runs import random_adapter

pytestmark = pytest.mark.slow
EACH = [(group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "symmetric"), EACH)
def test_a_weight_is_that_of_compressed_tensors_with_scales_as_vllm_reads_them(group, symmetric, stored, dtype):
    torch.manual_seed(0)
    parts = four_bits.packed(torch.randn(96, 256), group, symmetric, stored)
    given = [parts["weight_packed"], parts["weight_scale"].to(dtype)]
    given += [] if symmetric else [parts["weight_zero_point"]]
    found = packed_weights.whole(*given)
    assert found.dtype == dtype
    assert torch.equal(found, four_bits.whole(parts, group, symmetric, dtype))
    assert found.unique().numel() > 100


def learner(folder, dtype=torch.bfloat16, compiled=False, words=None, **placing):
    """The model in ``folder`` with a random adapter, as the learner has it."""
    model = attach_head(meta_model(section(folder, **(words or {})), dtype), TiledLogProbs())
    base = load_weights(folder, BaseModel.read(folder))
    check_shapes(model, base, str(folder))
    adapter = random_adapter(new_adapter(model, 0), seed=1, scale=0.2)
    model = place_model(model, base, adapter, torch.device("cpu"), dtype, **placing)
    for parameter in model.parameters():
        if parameter.requires_grad:  # unsharded, nothing else casts them
            parameter.data = parameter.data.to(dtype)
    if compiled:
        compile_each_layer(model, "aot_eager")
    return model


def computed(model):
    """Log-probs with the adapter and without, and the adapter's gradient."""
    batch = collate_step(make_samples([31, 9, 50, 17]), 0, packed=True)
    logprobs = model(**batch.inputs()).logprobs
    (logprobs * batch.old_logprobs).sum().backward()
    with torch.no_grad(), disable_adapter(model):
        bare = model(**batch.inputs()).logprobs
    return logprobs.detach(), adapter_gradient(model), bare


WAYS = {
    "as it is": {},
    "checkpointed": {"activation_checkpointing": True},
    "fp16": {"dtype": torch.float16},
    "compiled": {"compiled": True},
    "LoRA on some": {"words": {"lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False}},
    "dropout": {"words": {"lora_dropout": 0.5}},
}


@pytest.mark.parametrize(
    ("name", "way", "symmetric"),
    [
        *((name, "as it is", True) for name in ONE_EACH),
        *((ONE_EACH[0], way, False) for way in WAYS if way != "compiled"),
        pytest.param(ONE_EACH[0], "compiled", False, marks=pytest.mark.drill),  # minutes
    ],
)
def test_log_probs_and_gradients_are_those_of_the_weights_written_out(tmp_path, name, way, symmetric):
    found, kind = [], WAYS[way].get("dtype", torch.bfloat16)
    for folder in random_four_bits(tmp_path / "model", name, symmetric=symmetric, dtype=kind):
        model = learner(folder, **WAYS[way])
        torch.manual_seed(3)  # of a dropout
        found.append(computed(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert (found[0][0] - found[0][2]).abs().max() > 0.1, "the adapter does something"


@pytest.mark.fault("a base in four bits is a whole copy in bf16 by the time of its gradient")
@pytest.mark.parametrize("way", ["as it is", "LoRA on some", "dropout"])
def test_no_whole_weight_is_kept(tmp_path, way):
    folder, _ = random_four_bits(tmp_path / "model")
    base, model = BaseModel.read(folder), learner(folder, **WAYS[way])
    held = sum(parameter.nbytes for name, parameter in model.named_parameters() if not parameter.requires_grad)
    others = sum(2 * shape[0] for shape in base.weights.values() if len(shape) == 1)
    assert held == base.held_bytes + others < 0.6 * base.parameters * 2
    kept, layers = [], {tuple(base.weights[f"{module}.weight"]) for module in base.four_bits.modules}
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        batch = collate_step(make_samples([31, 9]), 0, packed=True)
        model(**batch.inputs()).logprobs.sum().backward()
    assert {each.dtype for each in kept} >= {torch.int32}
    assert not [each.shape for each in kept if tuple(each.shape) in layers or tuple(each.T.shape) in layers]


def test_packed_weights_leave_for_the_host_and_come_back(tmp_path):
    model = learner(random_four_bits(tmp_path / "model", symmetric=False)[0])
    before, frozen = computed(model)[0], FrozenWeights(model)
    frozen.to_host()
    assert model.layers[0].attn.q_proj.weight_packed.untyped_storage().nbytes() == 0
    frozen.to_device()
    assert torch.equal(computed(model)[0], before)


@pytest.mark.fault("FLOPs are counted by the bytes of packed weights, and so is the share of the peak")
def test_flops_are_those_of_the_weights(tmp_path):
    found, expected = (
        training_flops(meta_model(section(folder), torch.bfloat16), 64, 0)
        for folder in random_four_bits(tmp_path / "model", symmetric=False)
    )
    assert found == expected


@pytest.mark.fault("weights of four bits are trained in fp32, in which no server multiplies with them")
def test_fp32_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"are of four bits, .* in half precision: give dtype=bf16 adapter_dtype"):
        meta_model(section(random_four_bits(tmp_path / "model")[0]), torch.float32)
