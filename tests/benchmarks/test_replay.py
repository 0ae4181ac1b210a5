"""What benchmarks/replay.py replays can be read and is always the same, and a difference is named."""

import json

import pytest
import torch
from safetensors.torch import save_file

from loop_formats.run_files import read_rollouts
from model_families.base_model import BaseModel
from model_families.chat.tokenizer import read_tokenizer
from support.experiment_scripts import load_script


@pytest.fixture(scope="module")
def replay():
    return load_script("benchmarks/replay.py")


def test_the_stored_rollouts_are_valid_and_the_same_each_time(replay, tmp_path):
    files = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        replay.write_inputs(folder)
        names = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
        files.append({name: (folder / name).read_bytes().replace(bytes(folder), b"") for name in names})
    assert files[0] == files[1]
    rollouts = [r.validate() for log in (tmp_path / "one/stored/collections").iterdir() for r in read_rollouts(log)]
    assert {rollout.segments for rollout in rollouts} == {1, 2}
    assert {rollout.reward for rollout in rollouts} == {0.0, 0.5, 1.0}
    assert 1e4 < BaseModel.read(tmp_path / "one/model").parameters < 2e5
    read_tokenizer(tmp_path / "one/model")


def run(folder, weights, **figures):
    (folder / "policies/policy-v0001").mkdir(parents=True)
    save_file({"a": torch.zeros(2), "b": torch.tensor(weights)}, folder / "policies/policy-v0001/adapter.safetensors")
    (folder / "metrics.jsonl").write_text(f"{json.dumps({'iteration': 1, **figures})}\n")
    return folder


@pytest.mark.parametrize(
    ("weights", "figures", "difference"),
    [
        ([1.0, 2.0], {"loss": 0.5, "seconds": 2.0, "new": 1}, None),
        ([1.0, 2.0000002], {"loss": 0.5}, "policies/policy-v0001/adapter.safetensors: b differs"),
        ([1, 2], {"loss": 0.5}, "policies/policy-v0001/adapter.safetensors: b differs"),
        ([1.0, 2.0], {"loss": 0.5000001}, "metrics 1: loss differs"),
        ([1.0, 2.0], {}, "metrics 1: loss is only in BASE"),
    ],
    ids=["neither the machine's figures nor new ones count", "a bit", "a type", "a figure", "one that is missing"],
)
def test_the_first_value_that_differs_is_named(replay, tmp_path, weights, figures, difference):
    before = run(tmp_path / "base", [1.0, 2.0], loss=0.5, seconds=1.0)
    now = run(tmp_path / "now", weights, **figures)
    assert replay.first_difference(*map(replay.learned, (before, now))) == difference


def test_a_base_that_is_no_commit_is_refused_in_one_line(replay, tmp_path):
    with (
        pytest.raises(SystemExit, match="no-such-commit is neither a folder nor a commit"),
        replay.base_checkout("no-such-commit", tmp_path / "checkout"),
    ):
        pass
