"""Whatever is wrong with a config is one line that names the key and the cure, before any work begins."""

import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_formats.folder_lock import lock_run
from loop_formats.run_files import write_rollouts
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.advantages import LeaveOneOut, Shuffled
from loop_recipes.config import preflight
from loop_recipes.config.components import check_component
from loop_recipes.config.files import CONFIGS, compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from support.random_policy import MODEL_CONFIG, write_adapter
from support.small_runs import replay_config
from support.texts import texts_beside

TABLES = texts_beside(__file__)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config_errors")
    replay_config(folder, iterations=1)
    (folder / "empty").mkdir()
    (folder / "gemma").mkdir()
    (folder / "gemma/config.json").write_text(json.dumps({**MODEL_CONFIG, "architectures": ["Gemma2ForCausalLM"]}))
    write_adapter(folder / "rslora", seed=0)
    file = folder / "rslora/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    return folder


def config(workspace, *overrides):
    return OmegaConf.merge(OmegaConf.load(workspace / "config.yaml"), OmegaConf.from_dotlist(list(overrides)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *TABLES["one_line_names_the_key_and_the_cure"],
        pytest.param(
            "device=cuda",
            "device: torch is a CPU build here; install the CUDA one",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="this torch can use a GPU"),
        ),
    ],
)
def test_one_line_names_the_key_and_the_cure(workspace, overrides, message):
    refused(config(workspace, *overrides.split("; ")), message)


@pytest.mark.parametrize(("key", "value", "message"), TABLES["whole_sections"])
def test_a_section_that_cannot_be_used_is_refused(workspace, key, value, message):
    cfg = config(workspace)
    OmegaConf.update(cfg, key, value, merge=False)
    refused(cfg, message)


def start(cfg):
    recipe = LoopAppWorldRecipe(cfg)
    try:
        recipe.setup()
    finally:
        recipe.cleanup()


def refused(cfg, message):
    """Start a config that is refused in one line, which holds these words."""
    with pytest.raises(ConfigError) as caught:
        start(cfg)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.fault("a component of the wrong kind, told only after its keys")
@pytest.mark.parametrize(("key", "component", "message"), TABLES["what_the_update_could_not_call_is_refused"])
def test_what_the_update_could_not_call_is_refused(workspace, key, component, message):
    cfg = config(workspace)
    cfg[key] = {"_component_": component, **({"level": "token"} if key == "loss" else {})}
    refused(cfg, message)


def test_a_folder_that_another_run_writes_to_is_refused(workspace):
    (workspace / "taken").mkdir()
    cfg = config(workspace, f"output_dir={workspace / 'taken'}")
    with lock_run(workspace / "taken"), pytest.raises(ConfigError, match=r"another run is using .*taken .*process"):
        start(cfg)


def test_an_adapter_that_would_act_otherwise_than_where_it_is_served_is_refused(workspace):
    folder = workspace / "adapter"
    write_adapter(folder, seed=0, rank=4)
    refused(config(workspace, f"initial_adapter={folder}"), "is [4, 64], in the config's model [8, 64]; make lora_rank")
    write_adapter(folder, seed=0)
    with pytest.raises(ConfigError, match=r"mlp.* is \[.*\], in the config's model missing; make .*apply_lora_to_mlp"):
        start(config(workspace, f"initial_adapter={folder}", "model.apply_lora_to_mlp=False"))
    file = folder / "adapter_config.json"
    stored = json.loads(file.read_text())
    for changed, message in (
        ({"lora_alpha": 7}, r"has lora_alpha 7; make model\.lora_alpha 7, it is 16"),
        ({"alpha_pattern": {"q_proj": 8}}, r"'alpha_pattern' is .*; it must be absent, off or empty"),
    ):
        file.write_text(json.dumps(stored | changed))
        with pytest.raises(ConfigError, match=message):
            start(config(workspace, f"initial_adapter={folder}"))


def test_a_folder_with_a_run_is_not_overwritten(workspace):
    (workspace / "old").mkdir()
    (workspace / "old/metrics.jsonl").write_text("{}\n")
    refused(
        config(workspace, f"output_dir={workspace / 'old'}"), "already holds a run; give resume_from_checkpoint=True"
    )
    write_rollouts(folder := workspace / "old/node/collections", "a", [])
    refused(config(workspace, f"rollout_node.replay={workspace / 'old'}"), f"no *.jsonl log; did you mean {folder}?")


def launched(workspace, **changes):
    """The config with a node that it launches."""
    cfg = OmegaConf.load(workspace / "config.yaml")
    del cfg["rollout_node"]
    node = {
        "root": str(workspace / "node"),
        "model": {"path": str(workspace / "base"), "dtype": "float32", "max_context": 512, "lora_rank": 8},
        "environment": {"name": "counter"},
        "port": 0,
    }
    return OmegaConf.merge(cfg, {"rollout_node": {"launch": True}, "node": node | changes})


@pytest.mark.parametrize(("changes", "message"), TABLES["the_launched_nodes_section_is_checked_too"])
def test_the_launched_nodes_section_is_checked_too(workspace, changes, message):
    refused(launched(workspace, **changes), message)


def test_a_node_elsewhere_needs_a_token_and_an_answer(workspace, monkeypatch):
    cfg = OmegaConf.load(workspace / "config.yaml")
    cfg.rollout_node = {"url": "http://127.0.0.1:9", "start_deadline_s": 0.1}
    monkeypatch.delenv("ROLLOUT_SERVER_TOKEN", raising=False)
    refused(cfg, "ROLLOUT_SERVER_TOKEN must hold the rollout node's bearer token")
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    with pytest.raises(RuntimeError, match=r"no rollout node at http://127\.0\.0\.1:9 .*fix the URL"):
        start(cfg)


def test_shuffled_advantages_are_the_same_ones_elsewhere_and_repeatable():
    rewards, groups = torch.arange(24.0) / 24, torch.arange(24) // 6
    plain, shuffled = LeaveOneOut()(rewards, groups), Shuffled()(rewards, groups)
    assert torch.equal(plain.sort().values, shuffled.sort().values)
    assert (plain == shuffled).float().mean() < 0.5
    assert torch.equal(shuffled, Shuffled()(rewards, groups))
    assert not torch.equal(shuffled, Shuffled(seed=1)(rewards, groups))


@pytest.mark.parametrize(("word", "message"), TABLES["a_warm_start_is_refused_before_it_begins"])
def test_a_warm_start_is_refused_before_it_begins(tmp_path, monkeypatch, word, message):
    folders = [f"output_dir={tmp_path}", f"policy_dir={tmp_path}", f"demonstrations.cache={tmp_path}"]
    config = str(CONFIGS / "warm_start/tiny_cpu.yaml")
    monkeypatch.setattr(sys, "argv", ["/somewhere/warm_start_appworld.py", "--config", config, *folders, word])
    with pytest.raises(SystemExit) as ended:
        sys.exit(import_module("warm_start_appworld").recipe_main())
    assert str(ended.value).startswith(f"warm_start_appworld: {message}")
    assert list(tmp_path.iterdir()) == []


def test_the_command_that_the_page_shows_trains_with_its_loss(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/architecture.md").read_text()
    [block] = [each for each in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "class MyLoss" in each]
    [words] = [line.split() for line in re.findall(r"`loop train ([^`]*my_loss[^`]*)`", page)]
    (tmp_path / "my_loss.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    loss = compose(words[0], words[1:]).loss
    assert check_component("loss", loss).__name__ == "MyLoss"


@pytest.mark.fault("the same file, model, adapter or run in another place is taken for another")
def test_a_copy_of_the_model_in_training_may_be_served(workspace, tmp_path):
    copy = shutil.copytree(workspace / "base", tmp_path / "copy")
    model = {"path": str(copy), "dtype": "float32", "max_context": 512}
    config = read_config(launched(workspace, model=model), LoopConfig)
    preflight._check_same_base(config, config.child)
