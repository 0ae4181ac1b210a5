"""A folder's weights are found in whatever files they are, and what is wrong with them is one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_families.base_model import BaseModel
from model_families.decoder.weights import load_weights
from model_families.weights.weight_files import StoredTensor, read_header, weight_files
from model_families.weights.weight_names import tune_name
from support.families import small, write_model
from support.model_folders import as_bin

ONE_FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model", small("Qwen3-4B"))


def loaded(folder):
    return load_weights(folder, BaseModel.read(folder))


def in_parts(folder):
    tensors = load_file(folder / ONE_FILE)
    (folder / ONE_FILE).unlink()
    index = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(names, f"model-{number}.safetensors")
    (folder / f"{ONE_FILE}.index.json").write_text(json.dumps({"weight_map": index}))


def with_more(folder, **tensors):
    save_file({**load_file(folder / ONE_FILE), **tensors}, folder / ONE_FILE)


def pickled_and_converted(folder):
    """By the command that the refusal names."""
    as_bin(folder)
    with pytest.raises(ValueError, match=r"convert it with `python -c") as refused:
        weight_files(folder)
    exec(str(refused.value).split('python -c "')[1].removesuffix('"`'))


@pytest.mark.parametrize("stored", [lambda folder: None, in_parts, pickled_and_converted])
def test_one_file_or_parts(folder, stored):
    expected = {tune_name(name): tensor for name, tensor in load_file(folder / ONE_FILE).items()}
    stored(folder)
    found = loaded(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_header_is_read_anew_when_its_file_changes(folder):
    before = read_header(folder / ONE_FILE)
    assert read_header(folder / ONE_FILE) is before
    with_more(folder, more=torch.zeros(2, 3, dtype=torch.bfloat16))
    assert read_header(folder / ONE_FILE)["more"] == StoredTensor(folder / ONE_FILE, (2, 3), "BF16")


def test_a_tied_head_may_be_there_and_must_be_the_embedding(folder):
    embedding = load_file(folder / ONE_FILE)["model.embed_tokens.weight"]
    with_more(
        folder, **{"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": embedding[0]}
    )
    assert "output.weight" not in loaded(folder)
    with_more(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(
        ValueError, match=r"lm_head\.weight is not model\.embed_tokens\.weight, to which config\.json ties"
    ):
        loaded(folder)


def test_what_is_missing_or_strange_is_named(folder):
    for name in ("visual.patch.weight", "model.layers.1.mlp.experts.0.up_proj.weight"):
        with_more(folder, **{name: torch.zeros(2)})
        with pytest.raises(ValueError, match=f"^{name} is not a weight of a decoder"):
            loaded(folder)
    (folder / ONE_FILE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: .*; copy it anew"):
        loaded(folder)
    (folder / ONE_FILE).unlink()
    (folder / f"{ONE_FILE}.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json cannot be read as an index of weights"):
        weight_files(folder)
