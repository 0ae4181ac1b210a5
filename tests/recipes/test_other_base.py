"""An adapter remembers the base weights that it was trained on; on others it is refused, or taken knowingly."""

import json
import shutil

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.torch import load_file, save_file

from loop_formats.schema import ConfigError
from loop_recipes.algorithm.method import check_run
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.preflight import check_adapter_folder
from loop_recipes.engine.checkpoint import load_latest
from support.random_policy import write_adapter, write_model
from support.small_runs import replay_config, train

pytestmark = pytest.mark.fault("an adapter on other base weights")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of one iteration: the folder of all, and the adapter that it made."""
    folder = tmp_path_factory.mktemp("begun")
    replay_config(folder, iterations=1)
    train(OmegaConf.load(folder / "config.yaml"))
    return folder, folder / "run/policies/policy-v0001"


def weights(base, change):
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def one_tensor(base):
    weights(base, lambda tensors: tensors["model.layers.1.self_attn.k_proj.weight"].add_(0.25))


def one_number(base):
    weights(base, lambda tensors: tensors["model.embed_tokens.weight"][7, 7].add_(0.25))


def another_seed(base):
    write_model(base, seed=9)


def moved_link(base):
    write_model(base.parent / "new", seed=9)
    base.rename(base.parent / "old")
    base.symlink_to("new")


def merged_adapter(base):
    """Somebody merged the adapter and saved the model in its place."""
    weights(
        base, lambda tensors: [tensor.mul_(1.01) for name, tensor in tensors.items() if name.endswith("q_proj.weight")]
    )


def another_precision(base):
    weights(base, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))


def as_it_was(base):
    pass


def moved(base):
    base.rename(base.parent / "real")
    base.symlink_to("real")


def tokenizer(base):
    file = base / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 512}))


def notes_beside(base):
    (base / "notes.json").write_text("{}")


def training_state_beside(base):
    (base / "optimizer.bin").write_bytes(b"what a trainer left")


@pytest.mark.parametrize(
    "change",
    [one_tensor, one_number, another_seed, moved_link, merged_adapter, another_precision],
    ids=lambda change: change.__name__,
)
def test_other_weights_are_refused_in_one_line(begun, tmp_path, change):
    config = on_changed(begun, tmp_path, change)
    with pytest.raises(
        ConfigError, match=r"^initial_adapter \S+ was trained on other base weights .*accept_changes=True$"
    ):
        check_run(config())
    check_run(config(accept_changes=True))


@pytest.mark.parametrize(
    "change", [as_it_was, moved, tokenizer, notes_beside, training_state_beside], ids=lambda change: change.__name__
)
def test_the_same_weights_are_the_same_wherever_they_lie(begun, tmp_path, change):
    check_run(on_changed(begun, tmp_path, change)())


def on_changed(begun, tmp_path, change):
    """Configs of a run in a new folder, which begins with the adapter on a copy of its base model that has changed."""
    folder, adapter = begun
    shutil.copytree(folder / "base", tmp_path / "base")
    replay_config(tmp_path, iterations=1, initial_adapter=str(adapter))
    change(tmp_path / "base")
    return lambda **keys: read_config(OmegaConf.merge(OmegaConf.load(tmp_path / "config.yaml"), keys), LoopConfig)


def test_what_others_have_written_says_nothing(begun, tmp_path):
    config = on_changed(begun, tmp_path, another_seed)
    write_adapter(tmp_path / "theirs", 0)
    check_adapter_folder("initial_adapter", str(tmp_path / "theirs"), config())


def test_what_goes_on_knowingly_makes_adapters_of_its_own_base(begun, tmp_path, caplog):
    from rollout_server.policies.adapter_check import other_base

    on_changed(begun, tmp_path, another_seed)
    train(OmegaConf.merge(OmegaConf.load(tmp_path / "config.yaml"), {"accept_changes": True}))
    assert "going on though initial_adapter" in caplog.text
    assert load_latest(tmp_path / "run/checkpoints").state["iteration"] == 1
    made = tmp_path / "run/policies/policy-v0001"
    assert other_base(made, str(tmp_path / "base")) is None
    assert "was trained on other base weights" in (other_base(made, str(begun[0] / "base")) or "")


def test_an_evaluation_says_it_and_goes_on(begun, tmp_path, capsys):
    from eval_appworld import EvalAppWorldRecipe
    from loop_recipes.evaluation.config import PolicyUnderTest
    from loop_recipes.evaluation.report import _describe

    write_model(tmp_path / "base", seed=9)
    recipe = object.__new__(EvalAppWorldRecipe)
    recipe._console, recipe._model = Console(width=400), str(tmp_path / "base")
    policy = PolicyUnderTest("trained", begun[1], "0" * 64)
    remarked = recipe._remarked(policy)
    said = capsys.readouterr().out
    assert said.startswith("policy trained was trained on other base weights (digest ")
    assert "; was trained on other base weights (digest " in _describe(remarked)
    assert remarked == policy, "its results are the same"
    recipe._model = str(begun[0] / "base")
    assert recipe._remarked(policy).remark == ""
    assert recipe._remarked(PolicyUnderTest("base", None, "base")).remark == ""
    assert capsys.readouterr().out == ""
    shutil.copytree(begun[1], tmp_path / "cut")
    (tmp_path / "cut/adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"^policy cut: \S+ cannot be read: [^\n]+$"):
        recipe._remarked(PolicyUnderTest("cut", tmp_path / "cut", "0" * 64))
