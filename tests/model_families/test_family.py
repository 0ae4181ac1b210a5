"""What a family takes of a config.json, and what it refuses in one line."""

import pytest

from model_families.base_model import FAMILIES, BaseModel
from model_families.family import Rope
from support.families import ONE_EACH, PUBLISHED, SCALED, small, write_config, write_model


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_spellings_of_positions_say_the_same(tmp_path, name):
    """Published files have ``rope_theta`` and ``rope_scaling``, those of transformers 5 ``rope_parameters``."""
    config = small(name)
    before = BaseModel.read(write_config(tmp_path / "published", config))
    now = {**config, "rope_parameters": {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}}
    for key in ("rope_theta", "rope_scaling"):
        now.pop(key, None)
    assert BaseModel.read(write_config(tmp_path / "now", now)) == before
    assert before.rope.base == PUBLISHED[name]["rope_theta"]


@pytest.mark.parametrize("name", ONE_EACH)
def test_what_transformers_writes_reads_as_what_it_was_given(tmp_path, name):
    config = small(name)
    before = BaseModel.read(write_config(tmp_path, config))
    assert BaseModel.read(write_model(tmp_path, config)) == before


def test_the_older_name_of_a_scaling_is_known(tmp_path):
    config = small("Qwen2.5-7B", rope_scaling={"type": "linear", "factor": 2})
    assert BaseModel.read(write_config(tmp_path, config)).rope == Rope(1e6, "linear", {"factor": 2.0})


@pytest.mark.parametrize(
    ("newer", "older", "lost"),
    [
        ({"rope_theta": 1e6, "rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}, "rope_theta, rope_type"),
        ({"rope_theta": 1e6}, {"rope_type": "linear", "factor": 2.0}, "rope_theta"),
        ({"rope_theta": 1e6}, {"type": "linear", "factor": 2.0, "rope_theta": 1e4}, "rope_theta"),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}, None),
        ({"rope_theta": 1e6, "rope_type": "default"}, {"rope_theta": 1e6, "rope_type": "default"}, None),
        ({}, {"type": "linear", "factor": 2.0}, None),
        ({"rope_theta": 1e6, "rope_type": "default"}, {}, None),
        ({"rope_theta": 1e6, "rope_type": "default"}, None, None),
        (None, None, None),
    ],
)
def test_positions_that_are_given_twice_are_read_as_transformers_reads_them(tmp_path, newer, older, lost):
    from transformers import AutoConfig

    config = small("Qwen2.5-7B") | {"rope_parameters": newer, "rope_scaling": older}
    folder = write_config(tmp_path, {key: value for key, value in config.items() if value is not None})
    if lost is not None:
        with pytest.raises(ValueError, match=rf"rope_scaling and rope_parameters differ in {lost}, .*; put"):
            BaseModel.read(folder)
        return
    theirs, ours = AutoConfig.from_pretrained(folder).rope_parameters, BaseModel.read(folder).rope
    assert (theirs["rope_theta"], theirs["rope_type"], theirs.get("factor")) == (
        ours.base,
        ours.kind,
        ours.scaling.get("factor"),
    )


REFUSED = [
    ("Qwen2.5-7B", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types has 'linear_attention'"),
    ("Qwen2.5-7B", {"quantization_config": {"bits": 4}}, r"quantization_config is {'bits': 4}"),
    ("Qwen2.5-7B", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("Qwen3-4B", {"attention_bias": True}, "attention_bias is True"),
    ("Llama-3.2-1B", {"mlp_bias": True}, "mlp_bias is True"),
    ("Qwen3-4B", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rotary scaling 'dynamic' cannot be built; those"),
    ("Qwen3-4B", {"rope_scaling": {"type": "linear"}}, "rotary scaling 'linear' lacks factor"),
    (
        "Qwen3-4B",
        {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1, "original_max_position_embeddings": 9}},
        "rotary scaling 'yarn' with attention_factor cannot be built",
    ),
    ("Llama-3.1-8B", {"rope_scaling": {**SCALED, "type": "linear"}}, "rotary scaling 'linear and llama3' cannot"),
    ("Llama-3.1-8B", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor cannot be other than"),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED)
def test_what_cannot_be_built_is_one_line(tmp_path, name, change, said):
    with pytest.raises(ValueError, match=rf"^\S+/config\.json: {said}.*$"):
        BaseModel.read(write_config(tmp_path, small(name) | change))


def test_a_family_is_known_by_one_architecture():
    assert list(FAMILIES) == ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"]
    assert all(family.architecture == name for name, family in FAMILIES.items())
