"""Values of a command line that YAML would read as something else, and what is asked of what a key builds."""

import math
import re
from functools import partial

import pytest
from omegaconf import OmegaConf

from loop_formats.schema import ConfigError
from loop_recipes.algorithm.losses import ClippedPolicyLoss
from loop_recipes.algorithm.method import check_run
from loop_recipes.config.components import check_component
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.evaluation.config import read_eval_config
from rollout_server.config import load_node_config
from support.small_runs import replay_config, train

FOLDERS = ["a #b", "#b", "a ", " a", "&x a", "runs/a #2", "a\t#b", "ü #1", "a # b # c", "x y"]


@pytest.mark.fault("a value of the command line that YAML cuts")
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_the_one_that_was_written(folder):
    assert compose("tiny_cpu", [f"output_dir={folder}"]).output_dir == folder


@pytest.mark.fault("a value of the command line that YAML cuts")
def test_values_that_are_meant_as_yaml_are_read_so(tmp_path):
    words = ["output_dir='a #b'", "seed=3", "max_iterations=2 # two", "run_name=null", "update={epochs: 2}"]
    words += [
        "optimizer.lr=1e-3",
        "resume_from_checkpoint=True",
        "model.path=${output_dir}/x",
        "collection.tasks=[a, b]",
    ]
    config = compose("tiny_cpu", words)
    assert (config.output_dir, config.seed, config.max_iterations, config.run_name) == ("a #b", 3, 2, None)
    assert (config["update"]["epochs"], config.optimizer.lr, config.resume_from_checkpoint) == (2, 1e-3, True)
    assert (config.model.path, list(config.collection.tasks)) == ("a #b/x", ["a", "b"])


@pytest.mark.fault("a value of the command line that YAML cuts")
def test_a_nodes_values_are_those_that_were_written(tmp_path):
    file = tmp_path / "node.yaml"
    OmegaConf.save(
        {"root": "r", "model": {"path": "m"}, "environment": {"name": "counter"}, "servers": {"urls": ["http://a"]}},
        file,
    )
    assert load_node_config(file, ["root=a #b"]).root == "a #b"


@pytest.mark.fault("a text that YAML took for a number")
@pytest.mark.parametrize("written", ["0755", "00", "010_0", "12:30", "1:30.5", "0x1F", "1099290_1", "+5", "no", "ON"])
def test_what_only_yaml_takes_for_a_number_is_a_text(tmp_path, written):
    file, text = tmp_path / "node.yaml", f"[{written}, {{NO: {written}, 1.10: 10_000, a: 1e-3, b: -5, c: true}}]"
    read = [written, {"NO": written, "1.10": 10_000, "a": 1e-3, "b": -5, "c": True}]
    file.write_text(f"root: r\nmodel: {{path: m}}\nenvironment: {{name: counter, mode: {text} # why\n}}\n")
    assert load_node_config(file).environment.options["mode"] == read
    for word, value in ((text, read), (written, written)):
        assert load_node_config(file, [f"environment.mode={word}"]).environment.options["mode"] == value
        assert compose("tiny_cpu", [f"node.environment.mode={word}"]).node.environment.mode == value


@pytest.mark.fault("an empty list that meant everything")
@pytest.mark.parametrize(
    ("recipe", "read", "keys"),
    [
        ("loop_appworld", partial(read_config, section=LoopConfig), "collection.tasks node.servers.urls"),
        ("sft_appworld", partial(read_config, section=SftConfig), "rollouts.logs data"),
        ("eval_appworld", read_eval_config, "tasks samplings policies"),
    ],
)
def test_a_list_that_chooses_has_something_in_it(recipe, read, keys):
    for key in keys.split():
        with pytest.raises(ConfigError, match=rf"^{key} must be .*a list that is not empty, not \[\]"):
            read(compose("tiny_cpu", [f"{key}=[]"], recipe))


@pytest.mark.fault("a misspelt kind of file without the name that was meant")
@pytest.mark.parametrize("key", ["machines", "wrld", "prset", "algorthm", "algo"])
def test_a_misspelt_kind_is_named(tmp_path, key):
    file = tmp_path / "mine.yaml"
    file.write_text(f"machine: tiny_cpu\n{key}: x\n")
    for name, words in ((str(file), []), ("tiny_cpu", [f"{key}=x"])):
        with pytest.raises(ConfigError, match=f"^unknown key '{key}'; did you mean '(machine|world|preset|algorithm)'"):
            compose(name, words)


@pytest.mark.fault("a seed beyond 64 bits")
@pytest.mark.parametrize("seed", [2**64, 2**63, -(2**63), 10**30])
def test_a_seed_has_room_for_what_is_added(tmp_path, seed):
    cfg = OmegaConf.merge(OmegaConf.load(replay_config(tmp_path, iterations=1)), {"seed": seed})
    with pytest.raises(ConfigError, match=r"^seed must be at (most|least)"):
        read_config(cfg, LoopConfig)


@pytest.mark.fault("two files over one machine share a folder")
def test_two_files_over_one_machine_are_two_runs(tmp_path):
    folders = []
    for name, text in (("first", "seed: 1\n"), ("second", "seed: 2\n"), ("third", "algorithm: grpo\n")):
        (tmp_path / f"{name}.yaml").write_text(f"machine: tiny_cpu\n{text}")
        folders.append(compose(str(tmp_path / f"{name}.yaml"), []).output_dir)
    assert len({*folders, compose("tiny_cpu", []).output_dir}) == 4
    own = tmp_path / "fourth.yaml"
    own.write_text("machine: tiny_cpu\noutput_dir: runs/mine\n")
    assert compose(str(own), []).output_dir == "runs/mine"


class OfSequences(ClippedPolicyLoss):
    """A loss of one's own, which has no key for its level."""

    def __init__(self, eps: float = 0.2) -> None:
        super().__init__(level="trajectory", eps=eps)


@pytest.mark.fault("a loss of one's own at another level")
def test_a_loss_says_its_level_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("loop_recipes.algorithm.losses.OfSequences", OfSequences, raising=False)
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    cfg.loss = {"_component_": "loop_recipes.algorithm.losses.OfSequences"}
    cfg.rollout_node = {"url": "http://127.0.0.1:1", "token_env": "LOOP_TEST_TOKEN"}
    monkeypatch.setenv("LOOP_TEST_TOKEN", "x")
    cfg.credit = {"critic": {"_component_": "loop_recipes.algorithm.critic.Critic"}}
    with pytest.raises(
        ConfigError, match=r"^loss\.level is 'trajectory'; credit\.critic gives tokens advantages of their own"
    ):
        check_run(read_config(cfg, LoopConfig))


@pytest.mark.fault("a component took inf, NaN or true for a number, or a line of torch's refused them")
@pytest.mark.parametrize(
    ("key", "values", "wanted"),
    [
        ("optimizer.lr", ["abc", math.inf, math.nan, True, [1.0]], "float|a finite number"),
        ("optimizer.weight_decay", ["abc", math.inf, False], "float|a finite number"),
        ("optimizer.eps", ["abc", math.nan], "float|a finite number"),
        ("optimizer.betas", [0.9], "a list"),
        ("optimizer.betas[0]", [[math.nan, 0.9], ["a", 0.9]], "float|a finite number"),
        ("optimizer.amsgrad", ["maybe", 1], "bool"),
        ("lr_scheduler.num_warmup_steps", ["abc", 1.5, math.inf, True], "int"),
        ("loss.eps", ["abc", math.nan, True], "float|a finite number"),
        ("loss.eps_high", ["abc", math.nan], "float|a finite number"),
        ("loss.eps_high", [0.0, -1.0], "above 0"),
        ("loss.kl_coefficient", [-1], "at least 0"),
        ("loss.level", [3, "word"], "token, turn, trajectory or geometric"),
        ("loss.clip", ["hard"], "symmetric, reciprocal, cispo or none"),
        ("model.lora_dropout", ["abc", math.nan], "float|a finite number"),
    ],
)
def test_an_argument_of_a_component_is_checked_as_other_keys_are(tmp_path, key, values, wanted):
    written = replay_config(tmp_path, iterations=1)
    for value in values:
        cfg = OmegaConf.load(written)
        OmegaConf.update(cfg, key.partition("[")[0], value)
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)} must be ({wanted}), not "):
            check_run(read_config(cfg, LoopConfig))


@pytest.mark.parametrize(
    ("component", "key", "value", "wanted"),
    [
        ("TruncatedWeights", "ratio_of", "turn", "token or sequence"),
        ("TruncatedWeights", "cap", 0.0, "above 0"),
        ("TruncatedWeights", "cap", math.nan, "a finite number"),
        ("DivergenceMask", "divergence", "js", "tv or kl"),
        ("DivergenceMask", "limit", 0.0, "above 0"),
    ],
)
def test_an_argument_within_another_is_named_with_its_place(component, key, value, wanted):
    inner = {"_component_": f"loop_recipes.algorithm.sampler_correction.{component}", key: value}
    outer = {"_component_": "loop_recipes.algorithm.losses.Reinforce", "sampler_correction": inner}
    with pytest.raises(ConfigError, match=rf"^loss\.sampler_correction\.{key} must be {wanted}, not "):
        check_component("loss", outer)


def test_the_stored_config_begins_a_run_elsewhere_in_that_runs_folder(tmp_path):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    cfg.node = {"port": 0, "root": "${output_dir}/node", "model": {"path": str(tmp_path / "base")}}
    cfg.node |= {"environment": {"name": "counter"}}
    train(cfg)
    moved = compose(str(tmp_path / "run/config.yaml"), [f"output_dir={tmp_path / 'new'}"])
    assert moved.node.root == f"{tmp_path / 'new'}/node"
