"""A critic of turns, as the recipe trains it: its exact resume, how it is read back, who must not see what it sees."""

import pytest
import torch

from loop_contrib.sweet_rl.stored_critic import critic_config, load_turn_critic
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.preferences import ReturnPairs
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.config.sft_config import FixedSetConfig
from loop_recipes.engine.samples import training_samples
from loop_recipes.rollouts.fixed_set import read_fixed_set
from support.sft_runs import PAIRS, STEP, STEPS, check_resumed, train
from support.small_runs import sft_config

CRITIC = {
    "advantage": PAIRS["advantage"],
    "loss": {"_component_": "loop_contrib.sweet_rl.turn_critic.TurnAdvantage", "beta": 1.0},
    "samples": {
        "_component_": "loop_contrib.sweet_rl.turn_critic.WithHidden",
        "information": {"_component_": "contrib_support.hidden_tasks.MadeUpSecrets"},
    },
}


def test_resuming_after_death_in_mid_epoch_equals_never_stopping(tmp_path):
    check_resumed(tmp_path, {**CRITIC, "update": STEPS})


def test_a_critic_of_turns_is_read_back_as_it_was_trained(tmp_path):
    """Over the turns of a pair its advantages add up to the margin that the run told of, with what is hidden seen."""
    cfg = sft_config(tmp_path, **CRITIC, update=STEP, max_iterations=4)
    lines = train(cfg)
    assert [line["steps"] for line in lines] == [1] * 4
    assert [line["preference_margin"] for line in lines] == sorted(line["preference_margin"] for line in lines)
    rollouts = read_fixed_set(FixedSetConfig([str(tmp_path)])).rollouts
    samples = training_samples(rollouts, UpdateConfig())
    # The margin of an iteration is of the critic before its step.
    before = load_turn_critic(tmp_path / "run", tmp_path / "run/policies/policy-v0003").advantages(samples)
    assert {name: len(turns) for name, turns in before.items()} == {r.rollout_id: len(r.turns) for r in rollouts}
    tasks = {sample.task_id: number for number, sample in enumerate(samples)}
    rewards = torch.tensor([sample.reward for sample in samples])
    pairs = ReturnPairs(0.3).pairs(rewards, torch.tensor([tasks[sample.task_id] for sample in samples]))
    totals = [before[sample.rollout_id].sum().item() for sample in samples]
    margin = sum(totals[chosen] - totals[rejected] for chosen, rejected in pairs) / len(pairs)
    assert lines[-1]["preference_margin"] == pytest.approx(margin, rel=1e-4)
    blind = load_turn_critic(tmp_path / "run", reference_sees_hidden=False).advantages(samples)
    newest = load_turn_critic(tmp_path / "run").advantages(samples)
    assert any(not torch.equal(blind[name], newest[name]) for name in newest)
    train(cfg, "samples=null", f"output_dir={tmp_path / 'without'}", "max_iterations=1")
    train(sft_config(tmp_path / "actor", **PAIRS, update=STEP, max_iterations=1))
    with pytest.raises(ConfigError, match=r"DPO; a critic of turns comes from TurnAdvantage"):
        load_turn_critic(tmp_path / "actor/run")


def test_an_actor_is_not_told_what_is_hidden(tmp_path):
    with pytest.raises(ConfigError, match=r"samples must be null: .*DPO trains an actor"):
        train(sft_config(tmp_path, **{**CRITIC, "loss": PAIRS["loss"]}, update=STEP))


def test_the_stored_config_of_a_critic_chooses_no_component_but_the_projects(tmp_path):
    (tmp_path / "config.yaml").write_text("loss: {_component_: os.system, command: 'true'}\n")
    with pytest.raises(ConfigError, match=r"_component_ is .*, which only this file names"):
        critic_config(tmp_path)
