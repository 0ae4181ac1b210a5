"""A run's config is composed of a machine, a world, presets, algorithms, the file's own keys and the command line."""

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

from loop_formats.schema import ConfigError
from loop_recipes.config.files import CONFIGS, compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.paths import RECIPES
from rollout_server.config import as_config, as_keys
from support.texts import texts_beside

TABLES = texts_beside(__file__)


def written(folder: Path, name: str, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


def plain(config):
    return OmegaConf.to_container(config, resolve=False)


def test_each_layer_wins_over_those_below_it(tmp_path):
    update = "update: {{epochs: {0}, minibatch_rollouts: {0}}}\nseed: {0}\n"
    world = written(tmp_path, "w.yaml", f"{update.format(11)}\nstop: {{max_approx_kl: 1}}\n")
    preset = written(tmp_path, "p.yaml", f"{update.format(12)}\nkeep_last_checkpoints: 12\n")
    algorithm = written(tmp_path, "a.yaml", update.format(13))
    mine = "machine: tiny_cpu\nworld: w.yaml\npreset: ./p.yaml\nalgorithm: [grpo, a.yaml]\nupdate: {epochs: 14}\n"
    config = compose(written(tmp_path, "mine.yaml", mine), ["seed=15"])
    assert config.seed == 15
    assert plain(config)["update"]["epochs"] == 14
    assert plain(config)["update"]["minibatch_rollouts"] == 13
    assert plain(config)["update"]["min_abs_advantage"] == 0.0, "of grpo"
    assert config.keep_last_checkpoints == 12
    assert config.stop.max_approx_kl == 1
    assert config.max_iterations == 20, "of the machine"
    words = [f"world={world}", f"preset={preset}", f"algorithm=[grpo,{algorithm}]", "update.epochs=14", "seed=15"]
    assert read_config(compose("tiny_cpu", [*words, "output_dir=a"]), LoopConfig) == read_config(
        compose(str(tmp_path / "mine.yaml"), ["seed=15", "output_dir=a"]), LoopConfig
    )


def test_the_command_line_chooses_other_files_than_the_file(tmp_path):
    mine = written(tmp_path, "mine.yaml", "machine: tiny_cpu\nalgorithm: grpo\n")
    config = plain(compose(mine, ["algorithm=rloo", "machine=qwen2_5_7b"]))
    assert config["update"]["min_abs_advantage"] == 0.01, "nothing of grpo is left"
    assert config["loss"]["_component_"].endswith("Reinforce")
    assert config["output_dir"] == "${loop_home:}/runs/qwen2_5_7b_rloo_mine"
    assert "kl_coefficient" not in compose(mine, ["algorithm=null"]).loss


def test_paths_are_relative_to_the_file_and_on_the_command_line_to_the_working_folder(tmp_path, monkeypatch):
    written(tmp_path / "runs", "mine.yaml", "machine: ../base.yaml\n")
    written(tmp_path, "base.yaml", "machine: tiny_cpu\nseed: 7\n")
    written(tmp_path / "here", "w.yaml", "seed: 8\n")
    monkeypatch.chdir(tmp_path / "here")
    assert compose("../runs/mine.yaml").seed == 7
    assert compose("../runs/mine.yaml", ["world=w.yaml"]).seed == 8


def test_a_file_that_names_no_machine_is_one(tmp_path):
    """What `tune cp` gives is a machine: an algorithm wins over its keys."""
    copy = written(tmp_path, "mine.yaml", (CONFIGS / "machines/tiny_cpu.yaml").read_text())
    assert plain(compose(copy)) == {**plain(compose("tiny_cpu")), "machine": "mine"}
    for recipe in ("sft_appworld", "eval_appworld"):
        words = ["rollouts.logs=[a]"] if recipe == "sft_appworld" else []
        assert plain(compose(copy, words, recipe)) == {**plain(compose("tiny_cpu", words, recipe)), "machine": "mine"}
    config = compose(copy, ["algorithm=grpo", "world=babyai"])
    assert config.advantage["_component_"].endswith("StdNormalized")
    assert "warm_start_babyai" in plain(config.model)["path"], "the world's own tiny policy"
    assert plain(config)["output_dir"] == "${loop_home:}/runs/mine_babyai_grpo"


def test_a_component_or_environment_of_another_name_replaces_the_one_below():
    config = compose("tiny_cpu", ["world=colbench", "algorithm=rloo"])
    assert plain(config.node.environment) == {"name": "colbench", "seed": 0}
    assert plain(config.loss) == {"_component_": "loop_recipes.algorithm.losses.Reinforce"}
    other = compose("tiny_cpu", ["node.environment.name=counter", "node.environment.max_worlds=2"])
    assert plain(other.node.environment) == {"name": "counter", "max_worlds": 2}


def test_a_component_named_by_a_string_keeps_the_arguments():
    lr = compose("tiny_cpu").optimizer.lr
    config = compose("tiny_cpu", ["algorithm=grpo", "optimizer=torch.optim.Adam"])
    assert plain(config.optimizer) == {
        "_component_": "torch.optim.Adam",
        "lr": lr,
        "betas": [0.9, 0.99],
        "weight_decay": 0.0,
    }


def test_a_component_within_a_section_may_be_left_out_and_one_that_every_run_has_may_not():
    assert "credit" not in plain(compose("tiny_cpu", ["algorithm=ppo_critic", "~credit.critic"]))
    both = compose("tiny_cpu", ["algorithm=[ppo_critic,distillation]", "~credit.critic"])
    assert list(both.credit) == ["teacher"]
    correction = "loss.sampler_correction={_component_: loop_recipes.algorithm.sampler_correction.RatioMask}"
    assert plain(compose("tiny_cpu", [correction, "~loss.sampler_correction"])) == plain(compose("tiny_cpu"))
    with pytest.raises(ConfigError, match="~loss is a component, which cannot be left out"):
        compose("tiny_cpu", ["~loss"])


def test_a_file_serves_several_recipes(tmp_path):
    mine = written(
        tmp_path,
        "mine.yaml",
        "machine: tiny_cpu\nworld: babyai\noutput_dir: runs/mine\n"
        "eval: {split: dev_one_room}\nsft: {export_every: 3}\n",
    )
    train = read_config(compose(mine), LoopConfig)
    scored = read_config(compose(mine, [], "eval_appworld"), EvalConfig)
    fixed = read_config(compose(mine, [], "sft_appworld"), SftConfig)
    assert train.output_dir == scored.run == "runs/mine"
    assert scored.output_dir == "runs/mine/evaluation"
    assert (scored.policies[0].adapter, scored.policies[1].adapter) == (None, "runs/mine")
    assert (train.collection.split, scored.split) == ("train_one_room", "dev_one_room")
    assert train.node is not None
    assert scored.environment == train.node.environment
    assert (scored.limits.max_turns, scored.limits.max_tokens_per_turn) == (10, 48)
    assert fixed.export_every == 3
    assert fixed.model == train.model
    assert fixed.model["max_context"] == 2048
    begun = written(tmp_path, "begun.yaml", "machine: tiny_cpu\ninitial_adapter: runs/sft/policies/policy-v0003\n")
    before = read_config(compose(begun, [], "eval_appworld"), EvalConfig).policies[0]
    assert (before.name, before.adapter) == ("before", "runs/sft/policies/policy-v0003"), "what the run began with"


def test_an_evaluation_has_the_limits_that_are_trained_with(tmp_path):
    limits = "{max_thinking_tokens: 7, compaction: summary}"
    mine = written(tmp_path, "mine.yaml", f"machine: tiny_cpu\ncollection: {{limits: {limits}}}\n")
    scored = read_config(compose(mine, [], "eval_appworld"), EvalConfig).limits
    assert (scored.max_thinking_tokens, scored.compaction) == (7, "summary")
    plain = read_config(compose("tiny_cpu", [], "eval_appworld"), EvalConfig).limits
    assert (plain.max_thinking_tokens, plain.compaction) == (None, None)


def test_an_evaluation_is_of_the_run_that_the_same_words_train():
    words = ["preset=on_policy", "algorithm=grpo"]
    for machine, chosen in (("tiny_cpu", []), ("qwen2_5_7b", words), ("qwen2_5_32b", ["world=babyai"])):
        trained = read_config(compose(machine, chosen), LoopConfig).output_dir
        assert read_config(compose(machine, chosen, "eval_appworld"), EvalConfig).run == trained


@pytest.mark.parametrize(("recipe", "words", "message"), TABLES["a_mistake_is_one_line"])
def test_a_mistake_is_one_line(tmp_path, recipe, words, message):
    names = {
        "circle": written(tmp_path, "circle.yaml", "machine: circle.yaml\n"),
        "broken": written(tmp_path, "broken.yaml", "a: [1\nb: 2\n"),
        "listed": written(tmp_path, "listed.yaml", "- 1\n"),
    }
    name, *words = [word.format(**names) if word.startswith("{") else word for word in words]
    with pytest.raises(ConfigError, match=message) as caught:
        compose(name, words, recipe)
    assert "\n" not in str(caught.value)


def test_in_place_of_a_run_the_config_that_it_stores_is_named_and_is_one(tmp_path, monkeypatch):
    config = compose("tiny_cpu", ["world=babyai", "algorithm=[rloo,horizon_curriculum]", f"output_dir={tmp_path}"])
    stored = written(tmp_path, "config.yaml", OmegaConf.to_yaml(as_config(as_keys(read_config(config, LoopConfig)))))
    words = [f"output_dir={tmp_path}", "resume_from_checkpoint=True"]
    with pytest.raises(ConfigError) as refused:
        compose(str(tmp_path))
    assert str(refused.value) == f"{tmp_path} is a folder, not a config; give {stored} and {' '.join(words)}"
    again, asked = (read_config(compose(name, words), LoopConfig) for name in (stored, "tiny_cpu"))
    assert again.resume_from_checkpoint
    assert again.child.environment.name == "babyai" != asked.child.environment.name
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "runs/demo", "metrics.jsonl", "")
    with pytest.raises(ConfigError, match=r"^runs/demo is a folder, not a config; give a config and run=runs/demo$"):
        compose("demo", (), "eval_appworld")
    own = written(tmp_path, "train.yaml", "machine: tiny_cpu\n")
    for recipe in ("loop_appworld", "eval_appworld"):
        with pytest.raises(ConfigError, match=f"is a folder, not a config; give {own}$"):
            compose(str(tmp_path), (), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        *(("tiny_cpu", word, f"'{word}' is not understood; .* come key=value") for word in ("--seed=1", "=1", "-seed")),
        ("tiny_cpu", "seed=[", r"seed=\[: while parsing"),
        ("loop_appworld/tiny_tpu", "seed=1", r"(did you mean 'tiny_[cg]pu'\?|there are: .*_appworld/tiny_cpu)"),
        ("broken.yaml", "seed=1", "broken.yaml: "),
        ("", "seed=1", "no config"),
    ],
)
def test_a_mistake_is_one_line_of_the_recipe(tmp_path, monkeypatch, recipe, name, word, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "broken.yaml", "a: [1\nb: 2\n")
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{recipe}.py", "--config", name, "~seed", word])
    with pytest.raises(SystemExit, match=f"^{recipe}: .*{message}") as caught:
        import_module(recipe).recipe_main()
    assert "\n" not in str(caught.value)


def test_a_key_of_another_recipe_is_refused_on_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/a/eval_appworld.py", "--config", "tiny_cpu", "collection.limits.max_turns=3"])
    with pytest.raises(SystemExit, match="=3: collection is a key of loop_appworld, not of eval"):
        import_module("eval_appworld").recipe_main()


def test_a_misspelt_key_is_refused_wherever_it_stands(tmp_path):
    for text in ("machine: tiny_cpu\nsede: 1\n", "machine: tiny_cpu\ntrain: {sede: 1}\n"):
        with pytest.raises(ConfigError, match="unknown key 'sede'; did you mean 'seed'"):
            read_config(compose(written(tmp_path, "mine.yaml", text)), LoopConfig)
    with pytest.raises(ConfigError, match="unknown key 'splt'"):
        read_config(compose("tiny_cpu", ["splt=dev"], "eval_appworld"), EvalConfig)


@pytest.mark.parametrize("words", TABLES["words_are_merged_as_torchtune_merges_them"])
def test_words_are_merged_as_torchtune_merges_them(words):
    keys = plain(compose("qwen2_5_32b"))
    assert compose("qwen2_5_32b", words) == _merge_yaml_and_cli_args(Namespace(**keys), words)


def test_a_file_of_functions_is_told_the_config_that_its_training_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    with pytest.raises(ConfigError, match=r"`loop train mine\.py --model MODEL` trains on it and writes the config"):
        compose("mine.py", [], "eval_appworld")
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/train.yaml").touch()
    with pytest.raises(ConfigError, match=r"config: give the one that its training wrote, runs/mine/train\.yaml$"):
        compose("mine.py", [], "eval_appworld")
