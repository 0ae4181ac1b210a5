"""What a family takes of a config.json, and what it refuses in one line."""

import pytest

from model_families.base_model import BaseModel
from model_families.families.family import Rope
from support.families import ONE_EACH, PUBLISHED, small, write_config, write_model
from support.texts import texts_beside

TABLES = texts_beside(__file__)


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
    ("newer", "older", "lost"), TABLES["positions_that_are_given_twice_are_read_as_transformers_reads_them"]
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


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
BY_TRANSFORMERS = [
    ("Qwen2.5-7B", {"hidden_act": "gelu"}),
    ("Qwen3-4B", {"attention_bias": True}),
    ("Llama-3.2-1B", {"mlp_bias": True}),
    ("Qwen3-4B", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}}),
    ("Qwen3-4B", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    ("Llama-3.1-8B", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "rope_scaling": None}),
]


@pytest.mark.parametrize(("name", "change"), BY_TRANSFORMERS)
def test_what_no_family_builds_transformers_builds(tmp_path, name, change):
    base = BaseModel.read(write_model(tmp_path, small(name) | change))
    assert (base.family, base.layers) == (None, 2)
    assert base.lora_modules == ("down_proj", "gate_proj", "up_proj", "k_proj", "o_proj", "q_proj", "v_proj")


@pytest.mark.parametrize(("change", "said"), TABLES["what_cannot_be_trained_is_one_line"])
def test_what_cannot_be_trained_is_one_line(tmp_path, change, said):
    with pytest.raises(ValueError, match=rf"^\S+/config\.json: {said}.*$"):
        BaseModel.read(write_config(tmp_path, small("Qwen3-4B") | change))
