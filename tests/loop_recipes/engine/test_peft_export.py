"""An exported adapter, loaded by peft and transformers, is the same policy as the recipe's model."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loop_recipes.engine.model import meta_model, new_adapter
from loop_recipes.engine.peft_export import export_adapter, peft_name, read_adapter, tune_name
from loop_recipes.engine.sharding import place_model
from support.random_policy import write_model
from support.small_runs import base_weights, model_section, random_adapter


@pytest.mark.parametrize("tied", [True, False])
def test_peft_and_transformers_give_the_recipes_logits(tmp_path, tied):
    write_model(tmp_path / "base", tied=tied)
    section = model_section(tmp_path / "base", tied)
    model = meta_model(section, torch.float32)
    adapter = random_adapter(new_adapter(model, seed=0), seed=1)
    place_model(model, base_weights(tmp_path / "base", tied), adapter, torch.device("cpu"), torch.float32)
    folder = export_adapter(
        adapter, tmp_path / "policy-v0001", rank=8, alpha=16, base_model=str(tmp_path / "base"), dtype=torch.float32
    )
    tokens = torch.randint(0, section["vocab_size"], (2, 33), generator=torch.Generator().manual_seed(2))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        ours = model(tokens)
        bare = base(tokens).logits
        theirs = PeftModel.from_pretrained(base, folder)(tokens).logits
    assert (ours - theirs).abs().max() < 1e-5
    assert (bare - theirs).abs().max() > 1e-2, "the adapter changed nothing, so the comparison says nothing"


def test_an_export_reads_back_and_replaces_the_older_one(tmp_path):
    name = "layers.3.mlp.w2.lora_b.weight"
    for value in (1.0, 2.0):
        export_adapter(
            {name: torch.full((8, 4), value)},
            tmp_path / "policy",
            rank=4,
            alpha=8,
            base_model="base",
            dtype=torch.float32,
        )
    tensors, rank, alpha = read_adapter(tmp_path / "policy")
    assert (rank, alpha) == (4, 8.0)
    assert torch.equal(tensors[name], torch.full((8, 4), 2.0))
    assert json.loads((tmp_path / "policy" / "adapter_config.json").read_text())["target_modules"] == ["down_proj"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_names_map_both_ways_and_strangers_are_refused():
    name = "layers.11.attn.output_proj.lora_a.weight"
    assert peft_name(name) == "base_model.model.model.layers.11.self_attn.o_proj.lora_A.weight"
    assert tune_name(peft_name(name)) == name
    with pytest.raises(ValueError, match=r"output\.lora_a\.weight is no LoRA weight of a Qwen2 decoder layer"):
        peft_name("output.lora_a.weight")
    with pytest.raises(ValueError, match=r"adapter_config\.json is missing"):
        read_adapter(Path("/nonexistent"))
