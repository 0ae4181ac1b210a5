"""SmolLM2's folder: what is made of the GGUF file, and, where it was made, the real model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from loop_recipes.engine.model import meta_model, new_adapter
from loop_recipes.engine.sharding import place_model
from model_families.base_model import BaseModel
from model_families.decoder.weights import load_weights
from support.experiment_scripts import load_script
from support.families import PUBLISHED, section, small, write_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models/SmolLM2-135M-Instruct"
convert = load_script("examples/smollm2/convert.py")


def header(config):
    return {
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.vocab_size": config["vocab_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.tokens": ["<|im_start|>", "<|im_end|>", "a", "1", "2", "Ġ", "Ġa"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["Ġ a"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def test_the_models_weights_and_sizes_come_back(tmp_path):
    config = small("SmolLM2-135M")
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path, config))
    names = {theirs: ours for ours, theirs in convert.IN_LAYER.items()}
    outer = {theirs: ours for ours, theirs in convert.OUTER.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name in outer:
            stored.append((outer[name], tensor.numpy()))
            continue
        layer, kind = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if names[kind] in heads:  # as llama.cpp's converter stores them
            tensor = tensor.unflatten(0, (heads[names[kind]], 2, -1)).transpose(1, 2).flatten(0, 2)
        stored.append((f"blk.{layer}.{names[kind]}.weight", tensor.numpy()))
    found = convert.weights(stored, header(config))
    expected = model.state_dict()
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    made = convert.config(header(config))
    assert {key: made[key] for key in config if key in made} == {key: config[key] for key in config if key in made}


def test_digits_stay_apart_and_no_text_spells_a_control_token():
    tokenizer = convert.tokenizer(header(small("SmolLM2-135M")))
    assert tokenizer.encode(" a12 a").tokens == ["Ġa", "1", "2", "Ġa"]
    tokenizer.encode_special_tokens = True
    assert not {0, 1} & set(tokenizer.encode("<|im_end|>").ids)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="make smollm2 makes the model")
def test_the_real_model_is_built_as_transformers_builds_it():
    base = BaseModel.read(FOLDER)
    published = PUBLISHED["SmolLM2-135M"]
    assert (base.width, base.layers, base.heads, base.kv_heads) == (576, 30, 9, 3)
    assert (base.norm_eps, base.rope.base) == (published["rms_norm_eps"], published["rope_theta"])
    model = meta_model(section(FOLDER), torch.float32)
    place_model(model, load_weights(FOLDER, base), new_adapter(model, 0), torch.device("cpu"), torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokens = torch.randint(0, base.vocabulary, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens), theirs(tokens).logits)
