"""A folder's tokenizer gives the same ids in everybody's hands, or it is said."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, dynamic_module_utils

from loop_recipes.paths import loop_package
from model_families.own_tokenizer import CODE, SETTINGS, differing_ids, read_as_written
from support import random_policy

TEXT = "x = 10_1; apis.login('joe')\n\n  # naïve"


def write_folder(folder, kind, named):
    """A tokenizer that cuts between any two letters, in a folder of a model of this kind, under this class's name."""
    random_policy.write_tokenizer(folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[a-z]"}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": named}))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))


@pytest.mark.parametrize(("kind", "named"), [("qwen2", "PreTrainedTokenizerFast"), ("qwen3", "Qwen2Tokenizer")])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizer_of_ones_own_is_told_apart_and_cured(tmp_path, monkeypatch, kind, named, trusted):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / f"{kind}_{trusted}"
    write_folder(folder, kind, named)
    assert "other ids" in differing_ids(folder)
    read_as_written(folder)
    assert differing_ids(folder) is None
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    assert theirs(TEXT)["input_ids"] == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    assert theirs.eos_token == "<|im_end|>"
    assert theirs.chat_template == random_policy.CHATML


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_tokenizer_that_all_read_alike_is_not_spoken_of(tmp_path, kind):
    random_policy.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert differing_ids(tmp_path) is None


def test_a_folder_without_a_tokenizer_is_not_spoken_of(tmp_path):
    assert differing_ids(tmp_path) is None


def test_the_tiny_policy_has_the_same_ids_in_transformers(tmp_path):
    folder = loop_package("tiny_policy")
    assert differing_ids(folder) is None
    read_as_written(tmp_path)
    assert (tmp_path / CODE).read_bytes() == (folder / CODE).read_bytes()
    assert json.loads((folder / "tokenizer_config.json").read_text()).items() >= SETTINGS.items()
