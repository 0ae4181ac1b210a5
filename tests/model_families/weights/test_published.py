"""Published models that transformers builds, by config.json and headers: their sizes are those of their cards."""

import pytest

from model_families.base_model import BaseModel
from model_families.opening import open_weights
from support.families import PUBLISHED_GENERAL, write_config, write_headers
from support.tiny_models import write_random

GIB = 2**30
CARDS = {  # billions of parameters, GiB of its text's weights as published, bytes of keys and values a token
    "Qwen3.5-4B": (4.21, 7.83, 8 * 2 * 4 * 256 * 2),
    "Qwen3-30B-A3B-Instruct-2507": (30.5, 56.9, 48 * 2 * 4 * 128 * 2),
    "gpt-oss-20b": (20.9, 12.8, 24 * 2 * 8 * 64 * 2),
    "gpt-oss-120b": (116.8, 60.8, 36 * 2 * 8 * 64 * 2),
    "SmolLM3-3B": (3.08, 5.73, 36 * 2 * 4 * 128 * 2),
}


@pytest.mark.parametrize("name", CARDS)
def test_sizes_are_those_of_the_card(name, tmp_path):
    """Without the tower that reads pictures, which nobody loads; routed experts of gpt-oss in MXFP4."""
    base = open_weights(write_headers(write_config(tmp_path, PUBLISHED_GENERAL[name]), 2))
    parameters, size, kept = CARDS[name]
    assert base.parameters == pytest.approx(parameters * 1e9, rel=0.003)
    assert base.served_bytes / GIB == pytest.approx(size, rel=0.003)
    assert base.kv_bytes_per_token == kept
    assert base.mxfp4 == name.startswith("gpt-oss")
    assert base.layer_parameters * base.layers + base.outer_parameters == pytest.approx(base.parameters, rel=0.02)


KEPT = {  # bytes a token of two layers in bf16
    "phi3": 2 * 2 * 2 * 16 * 2,
    "qwen3_5": 1 * 2 * 2 * 16 * 2,
    "lfm2": 1 * 2 * 2 * 16 * 2,
    "falcon_h1": 2 * 2 * 2 * 16 * 2,
    "granitemoehybrid": 1 * 2 * 2 * 16 * 2,
    "deepseek_v3": 2 * (16 + 8) * 2,
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_attention_keeps_of_a_token_is_read_from_the_weights(kind, tmp_path):
    """Fused projections, layers without attention, and latent attention, of which every GPU has the whole."""
    base = BaseModel.read(write_random(kind, tmp_path))
    assert base.kv_bytes_per_token == KEPT[kind]
    assert base.kv_heads == (1 if kind == "deepseek_v3" else 2)


@pytest.mark.parametrize(
    "other",
    [{"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}, {"quant_method": "mxfp4"}, {"bits": 4}],
)
def test_all_other_quantised_weights_are_refused(other, tmp_path):
    """MXFP4 too, of another kind than gpt-oss: transformers reads that of none."""
    name = "Qwen3-30B-A3B-Instruct-2507"
    folder = write_headers(write_config(tmp_path, PUBLISHED_GENERAL[name]))
    write_config(folder, PUBLISHED_GENERAL[name] | {"quantization_config": other})
    with pytest.raises(ValueError, match=r"quantization_config is .*, which cannot be trained; take the model's own"):
        BaseModel.read(folder)
