"""Every config that ships parses, is complete, and builds the algorithm that its name promises, for every model."""

import inspect
import itertools
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from agent_environments.protocol import pool_class
from loop_appworld import LoopAppWorldRecipe
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.critic import Critic
from loop_recipes.config.components import build, check_component
from loop_recipes.config.files import CONFIGS, compose, read_file
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.engine.model import meta_model
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.paths import config_files
from support.configs import files_read_once  # noqa: F401 - a fixture for all tests here
from support.families import with_config
from support.small_runs import replay_config, set_up
from support.texts import texts_beside

FILES = config_files()
MACHINES = tuple(FILES["machine"])
DATA = texts_beside(__file__)
PARAMETERS = DATA["parameters"]
"""Of the base model and its adapter; None where a warm start builds the model first."""
PRESETS = ("paper", "authors_code", "canopy", "draco_outcome")
OF_FIXED_SETS = ("dpo", "dpo_mcts", "sft_gt", "sweet_rl", "turn_critic")
ALGORITHMS = sorted(FILES["algorithm"].keys() - {*OF_FIXED_SETS})
EXPECTED = DATA["expected"]


SCHEMAS = {"loop_appworld": LoopConfig, "sft_appworld": SftConfig, "eval_appworld": EvalConfig}


@cache
def composed(recipe: str, *words: str) -> LoopConfig | SftConfig | EvalConfig | str:
    """The config of a machine and what else is chosen, or why it is refused; no test changes it."""
    try:
        return read_config(compose(words[0], words[1:], recipe), SCHEMAS[recipe])
    except ConfigError as error:
        return str(error)


def load(words: str, recipe: str = "loop_appworld"):
    config = composed(recipe, *words.split())
    assert not isinstance(config, str), config
    return config


@pytest.mark.parametrize("base", PARAMETERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_builds_over_every_model(name, base):
    config = load(f"{base} algorithm={name}")
    plain = load(base)
    assert config.model == plain.model
    assert config.child.servers == plain.child.servers
    served = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.dtype]
    assert config.child.model.dtype == served, "sampler and learner compute alike"
    assert Path(config.output_dir).name == f"{base.replace(' world=', '_')}_{name}"
    advantage, loss, level, kl_coefficient, one_step, critic = EXPECTED[name]
    assert type(build(config.advantage)).__name__ == advantage
    built = build(config.loss)
    assert type(built).__name__ == loss
    assert config.loss.get("level") == level
    assert built.kl_coefficient == kl_coefficient
    if level is not None:
        own = 0.2 if name == "dapo" else plain.loss["eps"]
        assert config.loss["eps"] == own, "the clip range is the model's, not the algorithm's, but DAPO's"
    assert (config.update.minibatch_rollouts is None and config.update.epochs == 1) == one_step
    assert ("critic" in config.credit) == critic
    check_component("optimizer", config.optimizer, positional=1)


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_build_and_are_loop_token(name):
    config = load(name)
    assert config.loss["level"] == "token"
    assert config.advantage["_component_"].endswith("LeaveOneOut")
    if PARAMETERS[name] is None:
        return
    model = meta_model(with_config(config.model), torch.float32 if name in ("tiny_cpu", "cpu") else torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(PARAMETERS[name], rel=0.03)


@pytest.mark.parametrize("base", MACHINES)
@pytest.mark.parametrize("name", OF_FIXED_SETS)
def test_every_algorithm_on_a_fixed_set_builds_over_every_model(name, base):
    config = load(f"{base} algorithm={name}", "sft_appworld")
    assert Path(config.output_dir).name == f"{base}_{name}"
    build(config.advantage)
    build(config.loss)
    made_for_it = name in ("dpo_mcts", "sft_gt", "sweet_rl")  # the others are given the logs of some run
    assert not made_for_it or all(f"/{base}_" in log for log in config.rollouts.logs), "ids belong to one model"


TOO_LONG = r"collection\.limits\.max_context is 32\d\d\d, more than the node's node\.model\.max_context, \d+"
REFUSED = (
    TOO_LONG,
    r"algorithm \w+ is one of (sft|loop)_appworld.*",
    r"preset \w+ is one of eval_appworld, not of (sft|loop)_appworld",
    r"update.max_trajectory_log_ratio must be left out: .*",
)
"""The reasons for which a combination may be refused."""


PAIRED = ("tiny_cpu",)
"""Machines on which two files are chosen at once: two things beside each other do not depend on a third."""


def choices(recipe: str, machine: str) -> list[list[str]]:
    """Words that choose one file, or for training on some machines two of different kinds."""
    kinds = [[f"{kind}={name}" for name in FILES[kind]] for kind in ("world", "preset", "algorithm")]
    one = [[word] for words in kinds for word in words]
    two = [list(pair) for these, those in itertools.combinations(kinds, 2) for pair in itertools.product(these, those)]
    return [[], *one, *(two if recipe == "loop_appworld" and machine in PAIRED else [])]


def refusal(recipe: str, machine: str, words: list[str]) -> str | None:
    """Why a combination is refused; None where it composes, with options that its environment takes."""
    config = composed(recipe, machine, *words)
    if isinstance(config, str):
        return config
    if (node := getattr(config, "node", None)) is not None and node.environment.name != "appworld":
        foreign = (
            node.environment.options.keys() - inspect.signature(pool_class(node.environment.name)).parameters.keys()
        )
        of_appworld = {"preset=paper", "preset=authors_code"} & {*words}
        assert foreign <= ({"prompt", "observation_max_tokens"} if of_appworld else set()), words
    return None


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", SCHEMAS)
def test_all_that_ships_composes_or_is_refused_in_one_line(recipe, machine):
    reasons = {tuple(words): refusal(recipe, machine, words) for words in choices(recipe, machine)}
    others = {words: said for words, said in reasons.items() if said and not re.fullmatch("|".join(REFUSED), said)}
    assert others == {}
    assert sum(said is None for said in reasons.values()) > len(reasons) / 3


def test_the_clips_and_corrections_of_the_page_are_words_on_the_command_line():
    page = (CONFIGS.parents[1] / "docs/algorithms.md").read_text()
    words = re.findall(r"`(loss\.\w+=[^`]+)`", page) + re.findall(r"^ {4}(loss\..*)$", page, flags=re.M)
    assert len(words) == 5
    for chosen in map(shlex.split, words):
        loss = read_config(compose("tiny_cpu", chosen), LoopConfig).loss
        check_component("loss", loss)
        build(loss)


def test_a_kl_term_is_on_every_rollout():
    configs = {name: load(f"tiny_cpu algorithm={name}") for name in ALGORITHMS}
    least = {name: each.update.min_abs_advantage for name, each in configs.items() if each.loss.get("kl_coefficient")}
    assert least == dict.fromkeys(["grpo", "reinforce_plus_plus_kl_loss"], 0.0)


def flat(tree: dict, head: str = "") -> dict:
    """{dotted key: value}"""
    values = {}
    for key, value in tree.items():
        values |= flat(value, f"{head}{key}.") if isinstance(value, dict) else {f"{head}{key}": value}
    return values


@pytest.mark.parametrize("algorithm", ["loop_turn", "loop_rwnorm", "grpo", "rloo", "ppo_critic", "reinforce_plus_plus"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_goes_under_an_algorithm_which_wins(name, algorithm):
    load(f"qwen2_5_32b preset={name} algorithm={algorithm}")
    cfg = flat(OmegaConf.to_container(compose("qwen2_5_32b", [f"preset={name}", f"algorithm={algorithm}"])))
    own = flat(read_file(FILES["algorithm"][algorithm]))
    other_loss = "loss._component_" in own  # its arguments are its own
    for key, value in flat(read_file(FILES["preset"][name])).items():
        if key in own:
            assert cfg[key] == own[key], key
        elif not (other_loss and key.startswith("loss.")):
            assert cfg[key] == value, key


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_head_of_a_config_says_how_it_runs(file):
    """Command, and of what runs by itself the hardware, the time and what to expect, or that it never ran."""
    head = file.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert re.search(r"^#   (loop|tune run|make) ", head, flags=re.M), "a command"
    if file.parent.name in ("machines", "worlds"):
        assert re.search(r"CPU|GPU|cores", head), "hardware"
        assert re.search(r"[Nn]ever run|minutes", head), "time, or never run"


def test_the_critic_has_the_papers_sizes_and_schedule():
    config = load("qwen2_5_32b algorithm=ppo_critic")
    with torch.device("meta"):
        critic = build(config.credit["critic"])
        critic.make_weights(5120)
    assert isinstance(critic, Critic)
    assert [list(p.shape) for p in critic.parameters() if p.ndim == 2] == [[3072, 5120], [2048, 3072], [1, 2048]]
    assert [critic.coefficient(0), critic.coefficient(200)] == pytest.approx([0.1, 0.001])
    assert critic.plan.policy_rests_iterations == 10


# The others need a critic of turns that was trained before, or a node: test_turn_credit.py takes their steps.
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not name.startswith("turn_")])
def test_every_algorithm_takes_a_step_on_stored_rollouts(tmp_path, name):
    """The algorithm's own sections on a random policy: one real iteration, and a second that the first one changed."""
    replay_config(tmp_path, iterations=2)
    words = [f"algorithm={name}", f"output_dir={tmp_path / 'run'}"]
    needed = {"ppo_critic": "credit.critic.warmup_iterations=0", "dapo": "collection.refill_budget=1"}
    words += [needed[name]] if name in needed else []
    recipe = LoopAppWorldRecipe(compose(str(tmp_path / "config.yaml"), words))
    with set_up(recipe):
        recipe.train()
    first, second = map(OmegaConf.create, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    one_step = EXPECTED[name][4]
    assert first.steps == (1 if one_step else first.steps) >= 1
    assert one_step or first.steps > 1
    assert first.grad_norm > 0
    assert first.loss != second.loss
    assert ("reference_kl" in second) == (EXPECTED[name][3] > 0)
    assert ("value_loss" in second) == EXPECTED[name][5]
    if one_step:
        assert second.approx_kl < 1e-9, "the policy of the step is the policy that sampled"
