"""An exported adapter, loaded by peft and transformers, is the same policy as the recipe's model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loop_formats.schema import ConfigError
from loop_recipes.engine.model import load_base, new_adapter
from loop_recipes.engine.peft_export import export_adapter, load_adapter, read_adapter
from loop_recipes.engine.sharding import place_model
from model_families.weights.weight_names import peft_name
from support.families import PUBLISHED, WORDS, section, small, write_model
from support.learner_cases import tiny_lora_model
from support.small_runs import random_adapter
from support.texts import texts_beside

TABLES = texts_beside(__file__)


def test_an_export_reads_back_and_replaces_the_older_one(tmp_path):
    name = "layers.3.mlp.w2.lora_b.weight"
    model = tiny_lora_model(True)
    for value in (1.0, 2.0):
        tensors = {name: torch.full((8, 4), value)}
        export_adapter(tensors, model, tmp_path / "policy", base_model="base", base_digest=None, dtype=torch.float32)
    tensors, rank, alpha = read_adapter(tmp_path / "policy")
    assert (rank, alpha) == (4, 8.0)
    assert torch.equal(tensors[peft_name(name)], torch.full((8, 4), 2.0))
    assert json.loads((tmp_path / "policy" / "adapter_config.json").read_text())["target_modules"] == ["down_proj"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_weight_without_a_name_in_peft_is_refused():
    for name in ("output.lora_a.weight", "layers.1.attn.q_norm.lora_a.weight", "layers.1.attn.q_proj.weight"):
        with pytest.raises(ValueError, match=f"^{name} is not a LoRA weight of a decoder layer"):
            peft_name(name)


def test_what_is_no_adapter_is_refused():
    with pytest.raises(ValueError, match=r"adapter_config\.json is missing"):
        read_adapter(Path("/nonexistent"))


def torchtunes(name: str, folder: Path) -> SimpleNamespace:
    """A config that trains the small model of ``name`` in ``folder`` with torchtune's own builder of its family."""
    builder, kind = {
        "Llama-3.1-8B": ("torchtune.models.llama3_1.lora_llama3_1", "LLAMA3"),
        "Mistral-7B-v0.3": ("torchtune.models.mistral.lora_mistral", "MISTRAL"),
        "SmolLM2-135M": ("torchtune.models.llama2.lora_llama2", "LLAMA2"),
        "Qwen2.5-7B": ("torchtune.models.qwen2.lora_qwen2", "QWEN2"),
    }[name]
    config = small(name)
    model = {
        "_component_": builder,
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": 256,
        "norm_eps": config["rms_norm_eps"],
        "rope_base": int(config["rope_theta"]),
        "lora_rank": 4,
        "lora_alpha": 8,
    }
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": ["model.safetensors"],
        "model_type": kind,
        "output_dir": str(folder.parent / "unused"),
    }
    return SimpleNamespace(model=model, checkpointer=checkpointer, base_model=str(folder))


def from_its_folder(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(model=section(folder), checkpointer=None, base_model=str(folder))


def served_apart(conf: SimpleNamespace, tmp_path: Path) -> tuple[float, float]:
    """Between the logits of a model with a random adapter and those of transformers with the export; and what the
    adapter changes."""
    model, base = load_base(conf, torch.float32)
    adapter = random_adapter(new_adapter(model, seed=0), seed=1, scale=0.2)
    place_model(model, base, adapter, torch.device("cpu"), torch.float32)
    folder = export_adapter(
        adapter, model, tmp_path / "adapter", base_model=conf.base_model, base_digest=None, dtype=torch.float32
    )
    read = load_adapter(folder, model)
    assert all(torch.equal(read[name], tensor) for name, tensor in adapter.items())
    tokens = torch.randint(0, WORDS, (2, 33), generator=torch.Generator().manual_seed(2))
    bare = AutoModelForCausalLM.from_pretrained(conf.base_model, dtype=torch.float64)
    with torch.no_grad():
        unchanged = bare(tokens).logits
        theirs = PeftModel.from_pretrained(bare, folder).double()(tokens).logits
        ours = model.double()(tokens)
    return (ours - theirs).abs().max().item(), (unchanged - theirs).abs().max().item()


@pytest.mark.fault("weights that are not finite were trained on without a word")
@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
@pytest.mark.parametrize(("name", "dtype"), [("Qwen3-4B", torch.float16), ("Llama-3.1-8B", torch.bfloat16)])
def test_a_weight_that_is_not_finite_is_named_by_its_file(tmp_path, name, dtype, number):
    file = write_model(tmp_path, small(name)) / "model.safetensors"
    weights = {key: tensor.to(dtype) for key, tensor in load_file(file).items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float(number)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^model: {file}: model\.layers\.1\.mlp\.up_proj\.weight holds inf or nan"):
        load_base(from_its_folder(tmp_path), torch.float32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_familys_adapter_is_served_as_it_is_trained(tmp_path, name):
    apart, effect = served_apart(from_its_folder(write_model(tmp_path / "base", small(name))), tmp_path)
    assert apart < 1e-4 * effect


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Mistral-7B-v0.3", "Qwen2.5-7B"])
def test_what_torchtunes_builders_train_is_what_is_served(tmp_path, name, monkeypatch):
    """Its Llama and Mistral keep the rows of queries and keys in another order, in the adapter too."""
    changes = {}
    if "Llama" in name:
        scaling = PUBLISHED[name]["rope_scaling"]  # the builder's own
        changes = {"rope_scaling": scaling}
    conf = torchtunes(name, write_model(tmp_path / "base", small(name, **changes)))
    apart, effect = served_apart(conf, tmp_path)
    assert apart < 1e-4 * effect
    if name == "Qwen2.5-7B":
        return
    monkeypatch.setattr("loop_recipes.engine.peft_export.neighbour_heads", lambda model: None)
    apart, effect = served_apart(conf, tmp_path)
    assert apart > 0.1 * effect, "without it another policy is served"


@pytest.mark.parametrize(("change", "said"), TABLES["what_no_shape_tells_is_compared_with_the_config"])
def test_what_no_shape_tells_is_compared_with_the_config(tmp_path, change, said):
    conf = torchtunes("Qwen2.5-7B", write_model(tmp_path, small("Qwen2.5-7B")))
    conf.model |= change
    with pytest.raises(ConfigError, match=said):
        load_base(conf, torch.float32)


def test_an_unscaled_llama_is_not_one_that_is_scaled(tmp_path):
    conf = torchtunes("Llama-3.1-8B", write_model(tmp_path, small("Llama-3.1-8B", rope_scaling=None)))
    with pytest.raises(ConfigError, match="has other rotary positions"):
        load_base(conf, torch.float32)


def test_the_same_adapter_has_the_same_bytes(tmp_path):
    tensors = {"layers.3.mlp.w2.lora_b.weight": torch.ones(8, 4), "layers.3.mlp.w1.lora_a.weight": torch.ones(4, 8)}
    model, written = tiny_lora_model(True), set()
    for _ in range(30):  # in half of them safetensors itself writes another order
        export_adapter(tensors, model, tmp_path / "a", base_model="b", base_digest="0123", dtype=torch.float32)
        written.add((tmp_path / "a/adapter_model.safetensors").read_bytes())
    assert len(written) == 1
    assert read_adapter(tmp_path / "a")[0].keys() == set(map(peft_name, tensors))
    with safe_open(tmp_path / "a/adapter_model.safetensors", "pt") as content:
        assert content.metadata() == {"format": "pt", "base_model_digest": "0123"}
