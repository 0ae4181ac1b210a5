"""An exported policy is the one that was trained, in everybody's hands."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loop_formats.run_files import adapter_digest, in_order
from loop_formats.schema import ConfigError
from loop_recipes.export.policy import ExportConfig, export
from loop_recipes.paths import loop_package
from loop_recipes.verbs.export import main
from support import random_policy, small_runs
from support.model_folders import WITH_SYSTEM
from support.texts import texts_beside

TABLES = texts_beside(__file__)

pytestmark = pytest.mark.slow
SHARED = pytest.mark.fault("what is shared holds paths of this machine, or cannot be served as printed")
COMMIT = "c" * 40


def write_run(folder: Path, tied: bool = True, scale: float = 0.2, tokenizer: bool = True) -> Path:
    """A run as it is left: its config, a random adapter, and rollouts that it sampled."""
    base = folder / "base"
    if not base.exists():
        random_policy.write_model(base, tied=tied)
    config = OmegaConf.load(small_runs.replay_config(folder, iterations=2))
    config.model = {"path": str(base), "lora_rank": 8, "lora_alpha": 16, "apply_lora_to_mlp": True}
    config.model.lora_attn_modules = ["q_proj", "k_proj", "v_proj", "output_proj"]
    config.pop("checkpointer")
    run = folder / "run"
    run.mkdir()
    OmegaConf.save(config, run / "config.yaml")
    (folder / "logs").rename(run / "collections")
    random_policy.write_adapter(run / "policies/policy-v0002", 1, scale=scale, base=str(base), model=base)
    return run


def split_in_two(base: Path) -> None:
    """The same weights in two files with an index."""
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, base / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def logits(model) -> torch.Tensor:
    tokens = torch.randint(0, 290, (2, 33), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_merged_model_is_base_and_adapter(tmp_path, tied, parts):
    run = write_run(tmp_path, tied)
    if parts == 2:
        split_in_two(tmp_path / "base")
    done = export(run, ExportConfig(merge="fp32", rollouts=8))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    bare = logits(base)
    theirs = logits(PeftModel.from_pretrained(base, run / "policies/policy-v0002"))
    merged = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
    assert (logits(merged) - theirs).abs().max() < 1e-4
    assert (bare - theirs).abs().max() > 0.1, "the adapter changed nothing, so the comparison says nothing"
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    assert len(list(done.folder.glob("*.safetensors"))) == parts
    assert "log-probs of" in (done.folder / "README.md").read_text()
    assert done.serve == [f"vllm serve {done.folder} --served-model-name run-policy-v0002"]


def test_a_merge_in_half_precision_is_compared_and_says_its_type(tmp_path):
    done = export(write_run(tmp_path), ExportConfig(merge="bf16"))
    assert {tensor.dtype for tensor in load_file(done.folder / "model.safetensors").values()} == {torch.bfloat16}
    settings = json.loads((done.folder / "config.json").read_text())
    assert "bfloat16" in (settings.get("dtype"), settings.get("torch_dtype"))
    [check] = [note for note in done.notes if note.startswith("merge:")]
    assert "24 stored rollouts" in check
    assert "says nothing" not in check


def test_an_adapter_that_moves_nothing_makes_a_comparison_that_says_so(tmp_path):
    done = export(write_run(tmp_path, scale=0.0), ExportConfig(merge="bf16", rollouts=4))
    assert "that says nothing, because the adapter moves no log-prob by 0.1" in done.notes[-1]


def test_a_merge_that_loses_the_adapter_is_refused_and_leaves_no_folder(tmp_path, monkeypatch):
    import loop_recipes.export.merge as module

    run, read = write_run(tmp_path), module.read_adapter
    monkeypatch.setattr(module, "read_adapter", lambda folder: (*read(folder)[:2], 0.0))  # alpha
    with pytest.raises(ConfigError, match="too much of the adapter is lost"):
        export(run, ExportConfig(merge="fp32", rollouts=8))
    assert [path.name for path in run.glob("export/*")] == []


def test_an_adapter_is_exported_with_its_tokenizer_and_a_card(tmp_path):
    run = write_run(tmp_path)
    (tmp_path / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    done = export(run, ExportConfig())
    names = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names <= {path.name for path in done.folder.iterdir()}
    assert (done.folder / "adapter_model.safetensors").stat().st_mode & 0o444 == done.folder.stat().st_mode & 0o444
    name = "adapter_model.safetensors"
    assert (done.folder / name).read_bytes() == (run / "policies/policy-v0002" / name).read_bytes()
    assert AutoTokenizer.from_pretrained(done.folder).chat_template == random_policy.CHATML
    card = (done.folder / "README.md").read_text()
    for said in (
        'base_model: "base"',
        'license: "apache-2.0"',
        "licence: apache-2.0",
        "LeaveOneOut",
        "not been scored",
    ):
        assert said in card
    assert done.serve[0].replace(str(done.folder), ".").replace(str(tmp_path / "base"), "base") in card
    assert f"--enable-lora --max-lora-rank 8 --lora-modules run-policy-v0002={done.folder}" in done.serve[0]


def test_the_version_that_a_run_began_with_is_said_to_be_untrained(tmp_path):
    run = write_run(tmp_path)
    (run / "policies/policy-v0002").rename(run / "policies/policy-v0000")
    done = export(run, ExportConfig())
    said = "policy-v0000 is the adapter that the run began with: no step has trained it"
    assert said in done.lines()
    assert f"- {said}" in (done.folder / "README.md").read_text()


def test_the_card_has_the_scores_of_this_version_alone(tmp_path):
    run = write_run(tmp_path)
    folder = run / "evaluation"
    folder.mkdir()
    figure = {"mean": 70.0, "std": None, "interval": {"low": 60.0, "high": 80.0}}

    def score(name):
        return {"policy": name, "sampling": {"label": "greedy"}, "runs": 1, "success": figure, "group_success": figure}

    digest = adapter_digest(run / "policies/policy-v0002")
    sums = {"before": None, "after": digest, "another": "0" * 64}
    report = {"schema": 2, "dataset": "worlds", "split": "test", "tasks": ["a", "b"], "level": 0.95}
    report |= {"policies": [{"name": name, "sha256": each} for name, each in sums.items()]}
    (folder / "report.json").write_text(json.dumps(report | {"scores": [score(name) for name in sums]}))
    (folder / "results.jsonl").write_text("")
    card = (export(run, ExportConfig()).folder / "README.md").read_text()
    assert "worlds, split test (2 tasks):" in card
    assert "| before | greedy | 1 | 70.0 [60.0, 80.0] |" in card
    assert "| after | greedy | 1 | 70.0 [60.0, 80.0] |" in card
    assert "another" not in card


@pytest.mark.parametrize("merge", [None, "bf16"])
def test_a_tokenizer_that_others_would_replace_is_read_as_it_is_written(tmp_path, merge):
    random_policy.write_model(tmp_path / "base")
    file = tmp_path / "base/tokenizer.json"
    words = json.loads(file.read_text())
    words["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[a-z]"}
    file.write_text(json.dumps(words))
    done = export(write_run(tmp_path), ExportConfig(merge=merge, rollouts=0))
    assert "other ids" in done.notes[0]
    assert len(AutoTokenizer.from_pretrained(done.folder)("print").input_ids) == 5
    assert len(AutoTokenizer.from_pretrained(tmp_path / "base")("print").input_ids) < 5
    assert (f"--tokenizer {done.folder}" in done.serve[0]) == (merge is None)


@pytest.mark.parametrize(("words", "said"), TABLES["what_cannot_be_exported_is_one_line"])
def test_what_cannot_be_exported_is_one_line(tmp_path, capsys, monkeypatch, words, said):
    run = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()  # transformers shows a bar
    assert main([str(run), *words]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert re.search(said, line)


@pytest.mark.parametrize("content", [[], ["metrics.jsonl"]])
def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys, content):
    run = tmp_path / "run"
    run.mkdir()
    for name in content:  # which alone does not make it a run that can be offered in its own place
        (run / name).touch()
    assert main([str(run)]) == 1
    problem = f"{run} is not a folder of a training run: it holds no config.yaml\n"
    assert capsys.readouterr().err == f"loop export: {problem}"


def test_the_newest_policy_of_the_tiny_policys_run_is_taken(tmp_path):
    run = write_run(tmp_path)
    stored = OmegaConf.load(run / "config.yaml")
    stored.model.path = str(loop_package("tiny_policy"))
    OmegaConf.save(stored, run / "config.yaml")
    for version in (9, 10):
        random_policy.write_adapter(run / f"policies/policy-v{version:04d}", version, model=loop_package("tiny_policy"))
    done = export(run, ExportConfig(to=str(tmp_path / "mine")))
    assert done.folder == tmp_path / "mine"
    assert in_order(run.glob("policies/*"))[-1].name in (tmp_path / "mine/README.md").read_text()
    assert done.notes == []


@SHARED
@pytest.mark.parametrize("merge", [None, "bf16"])
@pytest.mark.parametrize("cached", [True, False])
def test_what_is_shared_names_the_model_and_no_path_of_this_machine(tmp_path, merge, cached):
    run = write_run(tmp_path)
    if cached:
        base = tmp_path / f"hub/models--org--small/snapshots/{COMMIT}"
        base.parent.mkdir(parents=True)
        (tmp_path / "base").rename(base)
    else:
        base = tmp_path / "base"
    for name, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path")):
        settings = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**settings, key: str(base)}))
    first = run / "policies/policy-v0001"
    random_policy.write_adapter(first, 3, base=str(base), model=base)
    stored = OmegaConf.load(run / "config.yaml")
    stored.merge_with({"model": {"path": str(base)}, "initial_adapter": str(first)})
    OmegaConf.save(stored, run / "config.yaml")
    done = export(run, ExportConfig(merge=merge, rollouts=0))
    texts = [path.read_text() for path in done.folder.rglob("*") if path.suffix in (".json", ".md", ".jinja")]
    assert [line for text in texts for line in text.splitlines() if str(tmp_path) in line] == []
    card = (done.folder / "README.md").read_text()
    assert f"- began with: {run.name}/policies/policy-v0001 (SHA-256 {adapter_digest(first)[:16]})" in card
    assert (f"org/small at commit {COMMIT}" in card) == cached
    if merge is None:
        shared = json.loads((done.folder / "adapter_config.json").read_text())
        named = (
            {"base_model_name_or_path": "org/small", "revision": COMMIT}
            if cached
            else {"base_model_name_or_path": "base"}
        )
        assert named.items() <= shared.items()


@SHARED
@pytest.mark.fault("export copied files that a model's folder links to, from anywhere on the machine")
@pytest.mark.parametrize("merge", [None, "bf16"])
@pytest.mark.parametrize("name", TABLES["nothing_is_read_or_shared_by_a_link"])
def test_nothing_is_read_or_shared_by_a_link(tmp_path, name, merge):
    run, secret = write_run(tmp_path), tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("my key")
    link = tmp_path / "base" / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(secret if name == "folder" else secret / "key")
    with pytest.raises(ConfigError, match="is a link out of its folder: put the file itself there"):
        export(run, ExportConfig(merge=merge, rollouts=0))


@SHARED
def test_links_within_the_hubs_cache_are_exported(tmp_path):
    run, base = write_run(tmp_path), tmp_path / f"hub/models--org--small/snapshots/{COMMIT}"
    (base.parents[1] / "blobs").mkdir(parents=True)
    base.mkdir(parents=True)
    for file in (tmp_path / "base").iterdir():
        (base / file.name).symlink_to(file.rename(base.parents[1] / "blobs" / file.name))
    stored = OmegaConf.load(run / "config.yaml")
    stored.merge_with({"model": {"path": str(base)}})
    OmegaConf.save(stored, run / "config.yaml")
    assert (export(run, ExportConfig(rollouts=0)).folder / "tokenizer.json").is_file()


@SHARED
@pytest.mark.parametrize("merge", [None, "bf16"])
def test_the_printed_line_runs_as_printed(tmp_path, merge):
    run = write_run(tmp_path).rename(tmp_path / "my run")
    file = tmp_path / "base/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": WITH_SYSTEM}))
    done = export(run, ExportConfig(merge=merge, rollouts=0))
    words = shlex.split(done.serve[0])
    assert str(done.folder) in [word.removeprefix("my-run-policy-v0002=") for word in words]
    assert words[-3:] == ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
