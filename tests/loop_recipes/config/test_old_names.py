"""Names of the last release's configs are read, with one line that says the present words."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from loop_contrib.sweet_rl.stored_critic import stored_config
from loop_formats import old_keys
from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose, read_config
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.config.old_names import found_under_old_name
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.paths import config_files
from rollout_server.config import as_keys, load_node_config, write_node_config


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(old_keys, "_said", set())


@pytest.mark.parametrize(
    ("recipe", "before", "now"),
    [
        ("loop_appworld", "grpo", "tiny_cpu algorithm=grpo"),
        ("loop_appworld", "loop_appworld/grpo extends=qwen2_5_7b", "qwen2_5_7b algorithm=grpo"),
        ("loop_appworld", "babyai_cpu", "tiny_cpu world=babyai"),
        ("loop_appworld", "tiny_cpu_agent", "tiny_cpu world=agent"),
        ("loop_appworld", "horizon_curriculum extends=tiny_cpu", "tiny_cpu algorithm=horizon_curriculum"),
        ("loop_appworld", "on_policy_fp16", "qwen2_5_32b preset=on_policy_fp16"),
        ("loop_appworld", "loop_turn extends=authors_code", "qwen2_5_32b preset=authors_code algorithm=loop_turn"),
        ("loop_appworld", "turn_credit extends=grpo", "tiny_cpu algorithm=[grpo,turn_credit]"),
        ("sft_appworld", "sft_gt extends=qwen2_5_32b", "qwen2_5_32b algorithm=sft_gt"),
        ("eval_appworld", "eval_appworld/babyai_cpu", "tiny_cpu world=babyai"),
        ("eval_appworld", "choose_on_dev extends=qwen2_5_32b", "qwen2_5_32b preset=choose_on_dev"),
    ],
)
def test_an_old_name_is_what_the_present_words_are(capsys, recipe, before, now):
    (name, *words), (machine, *chosen) = before.split(), now.split()
    own = ["output_dir=runs/a"]  # the folder keeps its old name
    old = compose(name, [*words, *own], recipe)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f" is {now} now; the old name works for one release" in said[0]
    assert OmegaConf.to_container(old) == OmegaConf.to_container(compose(machine, [*chosen, *own], recipe))


@pytest.mark.parametrize(
    ("name", "words", "folder"),
    [
        ("grpo", [], "tiny_cpu_grpo"),
        ("grpo", ["extends=paper"], "paper_grpo"),
        ("babyai_cpu", [], "babyai"),
        ("paper", [], "qwen2_5_32b_paper"),
    ],
)
def test_a_run_of_an_old_name_is_resumed_in_its_old_folder(name, words, folder):
    assert read_config(compose(name, words), LoopConfig).output_dir.endswith(f"/runs/{folder}")


def test_a_file_of_the_last_release_is_read(tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: grpo\noutput_dir: runs/${extends}_mine\nrollout_node:\n  config:\n    port: 8701\n"
        "    environment: {name: appworld, config: {prompt: loop}}\n"
    )
    config = read_config(compose(str(mine), ["rollout_node.config.max_concurrent_episodes=3"]), LoopConfig)
    assert config.output_dir == "runs/grpo_mine"
    assert config.advantage["_component_"].endswith("StdNormalized")
    assert (config.child.port, config.child.max_concurrent_episodes) == (8701, 3)
    assert config.child.environment.options["prompt"] == "loop"
    assert config.child.environment.options["observation_max_tokens"] == 200
    assert len(capsys.readouterr().err.splitlines()) == 3
    (tmp_path / "other.yaml").write_text(f"extends: {mine}\nseed: 3\n")
    assert read_config(compose(str(tmp_path / "other.yaml")), LoopConfig).child.port == 8701
    (tmp_path / "scores.yaml").write_text("extends: tiny_cpu\nrun: runs/mine\noutput_dir: runs/scores\n")
    scored = read_config(compose(str(tmp_path / "scores.yaml"), [], "eval_appworld"), EvalConfig)
    assert (scored.run, scored.output_dir) == ("runs/mine", "runs/scores")


def test_present_names_are_not_old_ones():
    for recipe in ("loop_appworld", "sft_appworld", "eval_appworld", "warm_start_appworld"):
        for name in config_files(recipe)["machine"]:
            if recipe != "warm_start_appworld":
                assert not found_under_old_name(name, None, recipe).files


def test_two_worlds_are_refused():
    with pytest.raises(ConfigError, match="babyai_cpu and colbench_cpu are two worlds; name one of them"):
        compose("colbench_cpu", ["extends=babyai_cpu"])


def test_what_a_file_extends_must_be_there(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: tiny_tpu\n")
    with pytest.raises(ConfigError, match=r"extends: no machine 'tiny_tpu'; there are: .*tiny_cpu"):
        compose(str(tmp_path / "mine.yaml"))


RUN = Path(__file__).parents[2] / "support/run_of_last_release"


def test_what_a_run_of_the_last_release_stored_is_read(tmp_path, capsys):
    """Its config begins a run again, or resumes it; its node starts; a critic is built from its config."""
    now = read_config(compose("tiny_cpu", ["output_dir=run"]), LoopConfig)
    stored = read_config(compose(str(RUN / "config.yaml")), LoopConfig)
    assert compared(stored) == compared(now)
    assert Path(stored.base_model).name == Path(now.base_model).name
    node = load_node_config(RUN / "rollout_node.yaml")
    assert compared(node) == compared(now.child)
    assert "under config; the old form works one release" in capsys.readouterr().err
    write_node_config(node, tmp_path / "rollout_node.yaml")
    assert load_node_config(tmp_path / "rollout_node.yaml") == node
    run = tmp_path / "critic"
    run.mkdir()
    (run / "config.yaml").write_text((RUN / "turn_critic.yaml").read_text())
    now = read_config(compose("tiny_cpu", ["algorithm=turn_critic", "output_dir=run"], "sft_appworld"), SftConfig)
    assert compared(stored_config(run)) == compared(now)


def compared(section):
    """The keys of a section, without the places of this machine, and without the base model, which has two spellings: a
    builder with the sizes, or its folder."""
    keys = {name: value for name, value in as_keys(section).items() if name not in ("model", "checkpointer")}
    text = json.dumps(keys, sort_keys=True).replace(', "num_warmup_steps": 0', "")  # the default
    return re.sub(r'"[^" ]*/(worlds|runs|\.venv-appworld|recipes/loop_recipes)(/[^"]*)?"', r'"/\1\2"', text)
