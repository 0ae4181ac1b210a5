import json

import pytest

from model_families.base_model import BaseModel, model_digest
from support.random_policy import HEADS, KV_HEADS, MODEL_CONFIG

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def test_another_architecture_is_described_by_its_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, "architectures": ["NewForCausalLM"]}))
    with pytest.raises(ValueError, match=r"^\S+ holds no weights: neither model.safetensors nor pytorch_model.bin"):
        BaseModel.read(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", '{"architectures": 1}', '{"architectures": {"a": 1}}', "[" * 100_000])
def test_what_is_no_configuration_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"^\S*config.json cannot be read as a model's configuration: .*$"):
        BaseModel.read(tmp_path)


@pytest.mark.parametrize(
    ("key", "said"),
    [("num_hidden_layers", "layers 0"), ("hidden_size", "width 0, head_width 0"), ("vocab_size", "vocabulary 0")],
)
def test_a_size_that_no_decoder_has_is_named(tmp_path, key, said):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, key: 0}))
    with pytest.raises(ValueError, match=rf"config\.json: it says {said}, which no decoder has$"):
        BaseModel.read(tmp_path)


def test_explicit_head_width_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, "head_dim": 128}))
    shapes = BaseModel.read(tmp_path).adapter_shapes(["q_proj", "k_proj", "o_proj"], 4)
    assert shapes[f"{Q_PROJ}.lora_B.weight"] == (HEADS * 128, 4)
    assert shapes[f"{Q_PROJ.replace('q_proj', 'k_proj')}.lora_B.weight"] == (KV_HEADS * 128, 4)
    assert shapes[f"{Q_PROJ.replace('q_proj', 'o_proj')}.lora_A.weight"] == (4, HEADS * 128)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r" holds no config\.json; download it"):
        BaseModel.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, "vocab_size": None}))
    with pytest.raises(ValueError, match=r"config\.json cannot be read as that of a decoder known here: TypeError"):
        BaseModel.read(tmp_path)


def test_a_tied_head_is_counted_once(tmp_path):
    counts = {}
    for tied in (True, False):
        (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, "tie_word_embeddings": tied}))
        counts[tied] = BaseModel.read(tmp_path).parameters
    assert counts[False] - counts[True] == MODEL_CONFIG["vocab_size"] * MODEL_CONFIG["hidden_size"]


def test_other_weights_or_another_tokenizer_have_another_digest(tmp_path):
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(bytes(3 << 20))
        (tmp_path / folder / "tokenizer.json").write_text("{}")
    here = tmp_path / "here"
    (here / "README.md").write_text("About it.")
    usual = model_digest(here)
    assert model_digest(tmp_path / "elsewhere") == usual
    changed = {usual}
    for name, content in (
        ("tokenizer.json", b"[]"),
        ("model.safetensors", b"\1" + bytes((3 << 20) - 1)),
        ("model.safetensors", bytes((3 << 20) - 1) + b"\1"),
        ("config.json", b"{}"),
    ):
        (here / name).write_bytes(content)
        changed.add(model_digest(here))
    assert len(changed) == 5


@pytest.mark.fault("the same file, model, adapter or run in another place is taken for another")
@pytest.mark.parametrize(
    "beside",
    [
        *("trainer_state.json", "optimizer.bin", "README.json", "training_args.bin", "adapter_model.safetensors"),
        *("optimizer.safetensors", "random_states_0.safetensors", "tokenizer_notes.json", "preprocessor_config.json"),
        "consolidated.safetensors",
    ],
)
def test_what_lies_beside_a_model_is_not_of_it(tmp_path, beside):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    usual = model_digest(tmp_path)
    (tmp_path / beside).write_text("{}")
    assert model_digest(tmp_path) == usual
