"""Folders in W4A16 of compressed-tensors: what config.json says of them before weights are read, and refusals."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_families.base_model import BaseModel
from model_families.opening import check_served_as, open_weights
from model_families.weights.published import published_config
from rollout_server.inference.command import ServerStartError, check_divided
from support.families import small, write_config
from support.four_bits import random_four_bits, settings
from support.texts import texts_beside
from support.tiny_models import write_random

TABLE = texts_beside(__file__)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR = 2 * (128 * (128 + 2 * 64 + 128) + 3 * 128 * 256)
OTHER = pytest.mark.fault("weights quantised in a way that both sides do not compute alike are taken, or not named")


def described(folder: Path, words: Mapping[str, Any], **changes: Any) -> BaseModel:
    """A model of two layers, by its config.json alone."""
    told = settings(32)
    for key, value in words.items():
        place = told["config_groups"]["group_0"] if key.startswith(".") else told
        *outer, last = key.removeprefix(".").split(".")
        for part in outer:
            place = place[part]
        place[last] = value
    config = small("Llama-3.2-1B") | SIZES | {"head_dim": 32} | changes
    return BaseModel.read(write_config(folder, config | {"quantization_config": told}))


@pytest.mark.parametrize("words", TABLE["taken"])
def test_w4a16_is_known_from_config_json(tmp_path, words):
    base = described(tmp_path, words)
    of_some = "re:" in str(words)
    assert len(base.four_bits.modules) == (7 if of_some else 14)
    assert of_some or base.held_bytes == base.served_bytes == 2 * base.parameters - LINEAR * (1.5 - 2 / 32)


@OTHER
@pytest.mark.parametrize(("words", "problem"), TABLE["refused"])
def test_all_else_of_compressed_tensors_is_one_line(tmp_path, words, problem):
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json: quantization_config has {problem}[^\n]*$"):
        described(tmp_path, words)


@OTHER
@pytest.mark.parametrize("words", TABLE["unread"])
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, words):
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json[^\n]*cannot be read as that of a decoder[^\n]*$"):
        described(tmp_path, words)


@OTHER
@pytest.mark.parametrize(("words", "changes", "problem"), TABLE["a_layer_without_a_place_in_it_is_one_line"])
def test_a_layer_without_a_place_in_it_is_one_line(tmp_path, words, changes, problem):
    write_random("llama", tmp_path)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json: [^\n]*{problem}[^\n]*$"):
        described(tmp_path, words, **changes)


@OTHER
def test_a_model_that_transformers_builds_is_one_line(tmp_path):
    write_random("gemma3_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings()}
    write_config(tmp_path, config)
    with pytest.raises(ValueError, match=r"^\S+config.json: weights of compressed-tensors are read of Qwen2, [^\n]*$"):
        BaseModel.read(tmp_path)


def without(name: str) -> Any:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.endswith(name)}


def changed(name: str, change: Any) -> Any:
    return lambda tensors: {key: change(each) if key.endswith(name) else each for key, each in tensors.items()}


@OTHER
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("1.mlp.down_proj.weight_scale"), "lacks the weight model.layers.1.mlp.down_proj.weight_scale;"),
        (
            without("q_proj.weight_zero_point"),
            "lacks the weight model.layers.0.self_attn.q_proj.weight_zero_point and 1",
        ),
        (changed("weight_packed", lambda t: t.to(torch.int64)), "weight_packed is I64: the weights are quantised"),
        (
            changed("weight_scale", lambda t: t[:, :1]),
            r"weight_scale is \[\d+, 1\], and config.json says \[\d+, [48]\]",
        ),
        (
            lambda t: t | {"model.layers.0.mlp.up_proj.weight_g_idx": torch.zeros(128)},
            "weight_g_idx is not a weight of the",
        ),
    ],
)
def test_the_headers_are_compared_with_config_json(tmp_path, change, problem):
    folder, whole = random_four_bits(tmp_path / "model", symmetric=False)
    assert open_weights(folder).parameters == open_weights(whole).parameters
    save_file(
        {k: t.contiguous() for k, t in change(load_file(folder / "model.safetensors")).items()},
        folder / "model.safetensors",
    )
    with pytest.raises(ValueError, match=problem):
        open_weights(folder)


@OTHER
@pytest.mark.parametrize(("dtype", "taken"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_a_server_computes_with_it_in_half_precision(tmp_path, dtype, taken):
    base = described(tmp_path, {})
    if taken:
        return check_served_as(tmp_path, base, 64, dtype)
    with pytest.raises(ValueError, match=r"are of four bits, .*: give dtype=bf16 adapter_dtype=bf16 node.model.dtype="):
        check_served_as(tmp_path, base, 64, dtype)


@OTHER
def test_gpus_of_a_server_divide_its_groups(tmp_path):
    base = described(tmp_path, {}, intermediate_size=32 * 3)
    check_divided(base, 1)
    with pytest.raises(ServerStartError, match="tensor_parallel_size is 2, by which the model's groups of 32 weights"):
        check_divided(base, 2)


@pytest.mark.parametrize(
    ("name", "gib"), [("Qwen2.5-7B-Instruct", 5.16), ("Qwen3-8B", 5.67), ("Qwen2.5-32B-Instruct", 17.89)]
)
def test_published_models_in_four_bits_are_planned_by_their_names(tmp_path, name, gib):
    config = published_config(f"models/{name}-quantized.w4a16")
    assert BaseModel.read(write_config(tmp_path, config)).held_bytes / 2**30 == pytest.approx(gib, rel=0.01)
    assert "quantization_config" not in published_config(f"models/{name}")
    with pytest.raises(ValueError, match=rf"tune download RedHatAI/{name}-quantized.w4a16 --output-dir"):
        BaseModel.read(tmp_path / f"{name}-quantized.w4a16")
