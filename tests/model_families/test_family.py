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


REFUSED = [
    ("Qwen2.5-7B", {"use_sliding_window": True}, "use_sliding_window is True, which cannot be trained"),
    ("Qwen2.5-7B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
    ("Qwen2.5-7B", {"quantization_config": {"bits": 4}}, r"quantization_config is {'bits': 4}"),
    ("Qwen2.5-7B", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("Qwen3-4B", {"attention_bias": True}, "attention_bias is True"),
    ("Llama-3.2-1B", {"mlp_bias": True}, "mlp_bias is True"),
    ("Mistral-7B-v0.3", {"sliding_window": 4096}, "sliding_window is 4096"),
    ("Qwen3-4B", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rotary scaling 'dynamic' cannot be built; those"),
    ("Qwen3-4B", {"rope_scaling": {"type": "linear"}}, "rotary scaling 'linear' lacks factor"),
    (
        "Qwen3-4B",
        {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1, "original_max_position_embeddings": 9}},
        "rotary scaling 'yarn' with attention_factor cannot be built",
    ),
    ("Llama-3.1-8B", {"rope_scaling": {**SCALED, "type": "linear"}}, "rotary scaling 'linear and llama3' cannot"),
    ("Llama-3.1-8B", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor cannot be other than"),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED)
def test_what_cannot_be_built_is_one_line(tmp_path, name, change, said):
    with pytest.raises(ValueError, match=rf"^\S+/config\.json: {said}.*$"):
        BaseModel.read(write_config(tmp_path, small(name) | change))


def test_a_family_is_known_by_one_architecture():
    assert list(FAMILIES) == ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"]
    assert all(family.architecture == name and family.chat for name, family in FAMILIES.items())
