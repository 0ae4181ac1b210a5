"""Every config that ships parses, is complete, and builds the algorithm that its name promises, for every model."""

from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.critic import Critic
from loop_recipes.config.components import build, check_component
from loop_recipes.config.files import CONFIGS, extended, read_config
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.engine.model import meta_model
from support.small_runs import replay_config

FOLDER = CONFIGS / "loop_appworld"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PARAMETERS = {
    "tiny_cpu": 1.52e6,
    "tiny_cpu_agent": 1.52e6,
    "tiny_gpu": 1.52e6,
    "babyai_cpu": 6.73e5,
    "colbench_cpu": 4.86e5,
    "mixed_cpu": 7.12e5,
    "textworldexpress_cpu": 7.0e5,
    "qwen2_5_1_5b_one_gpu": 1.56e9,
    "qwen2_5_7b_one_gpu": 7.66e9,
    "qwen2_5_7b": 7.66e9,
    "qwen2_5_32b": 32.9e9,
}
MODELS = tuple(PARAMETERS)
PRESETS = {
    "paper": {
        "model.lora_rank": 16,
        "model.lora_alpha": 32,
        "collection.split": "paper_train",
        "collection.tasks_per_iteration": 40,
        "collection.task_order": "uniform",
        "collection.rollouts_per_task": 6,
        "collection.min_rollouts_per_task": 4,
        "collection.min_rollouts_fraction": 0.9,
        "collection.limits.max_turns": 40,
        "collection.limits.max_tokens_per_turn": 1500,
        "collection.limits.max_context": 32000,
        "loss.clip": "symmetric",
        "update.min_abs_advantage": 0.01,
        "update.loss_divisor": "mean",
        "update.clip_grad_norm": 1.0,
        "update.max_trajectory_log_ratio": None,
        "update.unfinished_return": "zero",
        "update.max_tokens_per_rollout": None,
        "optimizer.lr": 5e-5,
        "rollout_node.config.environment.config.prompt": "loop",
        "rollout_node.config.environment.config.observation_max_tokens": 3000,
    },
    "authors_code": {
        "max_iterations": 200,
        "model.lora_rank": 16,
        "model.lora_alpha": 32,
        "model.lora_dropout": 0.0,
        "collection.split": "paper_train",
        "collection.tasks_per_iteration": 40,
        "collection.task_order": "uniform",
        "collection.rollouts_per_task": 6,
        "collection.min_rollouts_per_task": 4,
        "collection.min_rollouts_fraction": 0.9,
        "collection.limits.max_turns": 40,
        "collection.limits.max_tokens_per_turn": 1500,
        "collection.limits.max_context": 32768,
        "loss.clip": "reciprocal",
        "loss.eps": 0.1,
        "update.epochs": 2,
        "update.minibatch_rollouts": 32,
        "update.minibatch_sizes": "full",
        "update.min_abs_advantage": 0.01,
        "update.loss_divisor": 32.0,
        "update.clip_grad_norm": 0.2,
        "update.max_trajectory_log_ratio": 20.0,
        "update.unfinished_return": "graded",
        "update.max_tokens_per_rollout": 32000,
        "optimizer.lr": 5e-5,
        "optimizer.weight_decay": 0.01,
        "dev_evaluation.every": 5,
        "dev_evaluation.temperature": 0.0,
        "dev_evaluation.max_turns": 50,
        "rollout_node.config.environment.config.prompt": "loop",
        "rollout_node.config.environment.config.observation_max_tokens": 2968,
    },
}
ALGORITHMS = sorted(set(NAMES) - set(MODELS) - set(PRESETS))
# advantage, loss, level, kl_coefficient, one step per collection, critic
EXPECTED = {
    "tiny_cpu": ("LeaveOneOut", "ClippedPolicyLoss", "token", 0.0, False, False),
    "loop_turn": ("LeaveOneOut", "ClippedPolicyLoss", "turn", 0.0, False, False),
    "loop_bandit": ("LeaveOneOut", "ClippedPolicyLoss", "trajectory", 0.0, False, False),
    "loop_rwnorm": ("StdNormalized", "ClippedPolicyLoss", "token", 0.0, False, False),
    "rloo": ("LeaveOneOut", "Reinforce", None, 0.0, True, False),
    "grpo": ("StdNormalized", "ClippedPolicyLoss", "token", 0.04, True, False),
    "grpo_no_kl": ("StdNormalized", "ClippedPolicyLoss", "token", 0.0, True, False),
    "reinforce_plus_plus": ("ReturnToGo", "ClippedPolicyLoss", "token", 0.0, False, False),
    "reinforce_plus_plus_kl_loss": ("BatchNormalized", "ClippedPolicyLoss", "token", 0.01, False, False),
    "ppo_critic": ("LeaveOneOut", "ClippedPolicyLoss", "token", 0.0, False, True),
    "on_policy": ("LeaveOneOut", "ClippedPolicyLoss", "token", 0.0, True, False),
    "on_policy_fp16": ("LeaveOneOut", "ClippedPolicyLoss", "token", 0.0, True, False),
    "expert_iteration": ("Solved", "LogLikelihood", None, 0.0, False, False),
    "dmpo": ("ReturnPairs", "DMPO", None, 0.0, False, False),
    "turn_credit": ("LeaveOneOut", "ClippedPolicyLoss", "token", 0.0, False, False),
    "horizon_curriculum": ("LeaveOneOut", "ClippedPolicyLoss", "token", 0.0, False, False),
}


def load(name: str, **changes) -> LoopConfig:
    return read_config(extended(OmegaConf.merge(OmegaConf.load(FOLDER / f"{name}.yaml"), changes)), LoopConfig)


model_config = cache(load)


@pytest.mark.parametrize("base", MODELS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_builds_over_every_model(name, base):
    config = load(name, extends=base)
    plain = model_config(base)
    assert config.model == plain.model
    assert config.rollout_node.child.servers == plain.rollout_node.child.servers
    served = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.dtype]
    assert config.rollout_node.child.model.dtype == served, "sampler and learner compute alike"
    assert Path(config.output_dir).name == f"{base}_{name}"
    advantage, loss, level, kl_coefficient, one_step, critic = EXPECTED[name]
    assert type(build(config.advantage)).__name__ == advantage
    built = build(config.loss)
    assert type(built).__name__ == loss
    assert getattr(built, "level", None) == level
    assert built.kl_coefficient == kl_coefficient
    if level is not None:
        assert config.loss["eps"] == plain.loss["eps"], "the clip range is the model's, not the algorithm's"
    assert (config.update.minibatch_rollouts is None and config.update.epochs == 1) == one_step
    assert (config.critic is not None) == critic
    check_component("optimizer", config.optimizer, positional=1)


@pytest.mark.parametrize("name", MODELS)
def test_models_build_and_are_loop_token(name):
    config = load(name)
    assert config.loss["level"] == "token"
    assert config.advantage["_component_"].endswith("LeaveOneOut")
    model = meta_model(config.model, torch.float32 if name == "tiny_cpu" else torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(PARAMETERS[name], rel=0.03)


@pytest.mark.parametrize("base", ["tiny_cpu", "qwen2_5_32b"])
@pytest.mark.parametrize("name", ["dpo", "dpo_mcts", "sft_gt", "sweet_rl", "turn_critic"])
def test_every_algorithm_on_a_fixed_set_builds_over_every_model(name, base):
    cfg = OmegaConf.load(CONFIGS / f"sft_appworld/{name}.yaml")
    config = read_config(extended(OmegaConf.merge(cfg, {"extends": base}), "sft_appworld"), SftConfig)
    assert Path(config.output_dir).name == f"{base}_{name}"
    build(config.advantage)
    build(config.loss)
    made_for_it = name in ("dpo_mcts", "sft_gt", "sweet_rl")  # the others are given the logs of some run
    assert not made_for_it or all(f"/{base}_" in log for log in config.rollouts.logs), "ids belong to one model"


def test_a_kl_term_is_on_every_rollout():
    for name in ALGORITHMS:
        config = load(name)
        if config.loss.get("kl_coefficient"):
            assert config.update.min_abs_advantage == 0.0, name


def flat(tree: dict, head: str = "") -> dict:
    """{dotted key: value}"""
    values = {}
    for key, value in tree.items():
        values |= flat(value, f"{head}{key}.") if isinstance(value, dict) else {f"{head}{key}": value}
    return values


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_is_listed_here_and_nothing_else(name):
    own = flat(OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"), resolve=False))
    assert own.pop("extends") == "qwen2_5_32b"
    assert own.pop("output_dir").endswith(f"${{extends}}_{name}")
    assert own == PRESETS[name]
    assert load(name).loss["level"] == "token"


@pytest.mark.parametrize("algorithm", ["loop_turn", "loop_rwnorm", "grpo", "rloo", "ppo_critic", "reinforce_plus_plus"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_goes_under_an_algorithm_which_wins(name, algorithm):
    load(algorithm, extends=name)
    cfg = extended(OmegaConf.merge(OmegaConf.load(FOLDER / f"{algorithm}.yaml"), {"extends": name}))
    own = flat(OmegaConf.to_container(OmegaConf.load(FOLDER / f"{algorithm}.yaml"), resolve=False))
    other_loss = "loss._component_" in own  # its arguments are its own
    for key, value in PRESETS[name].items():
        if key in own:
            assert OmegaConf.select(cfg, key) == own[key], key
        elif not (other_loss and key.startswith("loss.")):
            assert OmegaConf.select(cfg, key) == value, key


def test_the_critic_has_the_papers_sizes_and_schedule():
    config = load("ppo_critic", extends="qwen2_5_32b")
    with torch.device("meta"):
        critic = build(config.critic, 5120)
    assert isinstance(critic, Critic)
    assert [list(p.shape) for p in critic.parameters() if p.ndim == 2] == [[3072, 5120], [2048, 3072], [1, 2048]]
    assert [critic.coefficient(0), critic.coefficient(200)] == pytest.approx([0.1, 0.001])
    assert critic.warmup_iterations == 10


def test_horizons_grow_up_to_the_papers_forty_turns():
    config = load("horizon_curriculum")
    stages = [(stage.from_iteration, stage.max_turns) for stage in config.collection.horizons]
    assert stages == sorted(stages)
    assert stages[0][0] == 1
    assert stages[-1][1] == config.collection.limits.max_turns == 40
    assert stages[-1][0] < config.max_iterations


def test_the_command_line_wins_over_the_file_and_the_file_over_what_it_extends():
    cfg = OmegaConf.merge(OmegaConf.load(FOLDER / "grpo.yaml"), {"loss": {"eps": 0.3}, "update": {"epochs": 3}})
    config = read_config(extended(cfg), LoopConfig)
    assert config.loss["eps"] == 0.3
    assert config.update.epochs == 3
    assert config.update.minibatch_rollouts is None
    assert config.update.micro_batch_tokens == load("tiny_cpu").update.micro_batch_tokens


def test_a_component_named_by_a_string_keeps_the_arguments():
    cfg = OmegaConf.merge(OmegaConf.load(FOLDER / "grpo.yaml"), {"optimizer": "torch.optim.Adam"})
    config = read_config(extended(cfg), LoopConfig)
    assert config.optimizer == load("tiny_cpu").optimizer | {"_component_": "torch.optim.Adam"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: tiny_tpu", r"extends: no config 'loop_appworld/tiny_tpu'; there are: .*loop_appworld/tiny_cpu"),
        ("extends: {here}", "goes in a circle"),
        ("extends: {broken}", "broken.yaml: "),
        ("extends: {listed}", "a config must be a mapping"),
    ],
)
def test_what_cannot_be_extended_is_one_line(tmp_path, text, message):
    (tmp_path / "broken.yaml").write_text("a: [1\nb: 2\n")
    (tmp_path / "listed.yaml").write_text("- 1\n")
    names = {"here": tmp_path / "mine.yaml", "broken": tmp_path / "broken.yaml", "listed": tmp_path / "listed.yaml"}
    (tmp_path / "mine.yaml").write_text(text.format(**names) + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        extended(OmegaConf.load(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value)


# turn_credit needs a critic of turns that was trained before: tests/recipes/test_turn_credit.py takes its steps.
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "turn_credit"])
def test_every_algorithm_takes_a_step_on_stored_rollouts(tmp_path, name):
    """The algorithm's own sections on a random policy: one real iteration, and a second that the first one changed."""
    replay_config(tmp_path, iterations=2)
    algorithm = OmegaConf.load(FOLDER / f"{name}.yaml")
    algorithm.extends = str(tmp_path / "config.yaml")
    algorithm.output_dir = str(tmp_path / "run")
    algorithm.pop("rollout_node", None)  # rollouts are replayed
    if name == "ppo_critic":
        algorithm.critic.warmup_iterations = 0
    cfg = extended(algorithm)
    recipe = LoopAppWorldRecipe(cfg)
    recipe.setup()
    recipe.train()
    recipe.cleanup()
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


def test_an_environment_of_another_name_has_only_its_own_options():
    node = load("tiny_cpu_agent").rollout_node.child
    assert node.environment.name == "harness"
    assert set(node.environment.config) == {"command", "max_worlds", "world"}
    assert node.environment.config["world"]["name"] == "appworld"
