"""A decoder that is built from its folder is the one that transformers builds from it: every family, every size."""

import pytest
import torch
from torchtune.modules import MultiHeadAttention
from transformers import AutoModelForCausalLM

from loop_recipes.engine.model import meta_model, new_adapter
from loop_recipes.engine.sharding import place_model
from model_families.base_model import BaseModel
from model_families.decoder.attention import NormFirstAttention
from model_families.decoder.weights import load_weights
from model_families.families.family import check_lora
from model_families.weights.weight_names import tune_name
from support.families import ONE_EACH, PUBLISHED, WORDS, section, small, write_config, write_model
from support.texts import texts_beside

TABLES = texts_beside(__file__)

TOKENS = torch.randint(0, WORDS, (2, 80), generator=torch.Generator().manual_seed(2))


def ours(folder, dtype=torch.float64):
    """The model in ``folder`` with an adapter that changes nothing."""
    model = meta_model(section(folder), torch.float32)
    base = load_weights(folder, BaseModel.read(folder))
    return place_model(model, base, new_adapter(model, 0), torch.device("cpu"), torch.float32).to(dtype)


def difference(folder):
    """Between our logits and transformers', in float64, and how far transformers' are from their mean."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        found = ours(folder)(TOKENS)
    return (found - expected).abs().max().item(), expected.std().item()


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, {}) for name in PUBLISHED),
        *((n, {"tie_word_embeddings": tied}) for n in ONE_EACH for tied in (True, False)),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, name, head):
    """To the rounding of the norms, which both compute in float32; heads tied and not."""
    apart, spread = difference(write_model(tmp_path, small(name, **head)))
    assert apart < 2e-5 * spread


SCALINGS = TABLES["scalings"]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", ONE_EACH)
def test_scaled_positions(tmp_path, name, scaling):
    changes = {"rope_scaling": SCALINGS[scaling], "rope_theta": 1000.0}
    apart, spread = difference(write_model(tmp_path / "scaled", small(name, **changes)))
    assert apart < 2e-5 * spread
    plain = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "plain", small(name, rope_scaling=None)))
    with torch.no_grad():
        unlike = plain.double()(TOKENS).logits - ours(tmp_path / "scaled")(TOKENS)
    assert unlike.abs().max() > 0.1 * spread, "the scaling changed nothing, so the comparison says nothing"


@pytest.mark.parametrize("named", [20, 256])
def test_positions_go_as_far_as_yarn_makes_them(tmp_path, named):
    """A card has the scaling added to a config.json that may go on to name the positions of before."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}
    folder = write_model(tmp_path, small("Qwen2.5-1.5B", rope_scaling=scaling, max_position_embeddings=named))
    assert BaseModel.read(folder).positions == max(named, 80)
    apart, spread = difference(folder)
    assert apart < 2e-5 * spread


def test_the_order_of_norm_and_rotation_is_caught(tmp_path, monkeypatch):
    """torchtune's own attention rotates first. With constant scales, as of a new model, nothing would show."""
    folder = write_model(tmp_path, small("Qwen3-4B"))
    assert difference(folder)[0] < 1e-4
    monkeypatch.setattr(NormFirstAttention, "forward", MultiHeadAttention.forward)
    apart, spread = difference(folder)
    assert apart > 0.1 * spread


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_built_whole(tmp_path, name):
    """On the meta device: the weights that transformers has, by its names, and their shapes; heads as they are said."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    folder = write_config(tmp_path, PUBLISHED[name])
    with init_empty_weights():
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    if PUBLISHED[name]["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    model = meta_model(section(folder), torch.bfloat16)
    built = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    assert {name: tensor.shape for name, tensor in built.items()} == {
        tune_name(name): tensor.shape for name, tensor in expected.items()
    }
    attention = model.layers[0].attn
    assert attention.head_dim == PUBLISHED[name].get("head_dim", attention.embed_dim // attention.num_heads)


def test_modules_of_lora_are_those_that_are_named(tmp_path):
    folder = write_config(tmp_path, small("Qwen3-4B"))
    names = section(folder, lora_attn_modules=["v_proj", "output_proj"], apply_lora_to_mlp=False)
    with_lora = {name.split(".")[3] for name in meta_model(names, torch.float32).state_dict() if ".lora_" in name}
    assert with_lora == {"v_proj", "output_proj"}


@pytest.mark.fault("a LoRA of rank 0, or on no layer, passed `loop check` or was refused in words of torchtune alone")
@pytest.mark.parametrize(("choice", "refused"), TABLES["lora"])
def test_a_choice_of_lora_that_cannot_be_is_refused(tmp_path, choice, refused):
    folder = write_config(tmp_path, small("Qwen3-4B"))
    for build in (lambda keys: meta_model(keys, torch.float32), lambda keys: check_lora(**keys)):
        with pytest.raises(ValueError, match=refused):
            build(section(folder, **choice))
