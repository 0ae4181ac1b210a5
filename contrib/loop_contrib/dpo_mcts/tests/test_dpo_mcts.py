"""DPO-MCTS from tree to policy: the command searches on a node, the recipe learns the pairs of turns that it found."""

import json
import math
from itertools import pairwise

import pytest
import torch
from omegaconf import OmegaConf

from loop_contrib.dpo_mcts import search_trees
from loop_contrib.paired_samples import TurnPairs
from loop_contrib.turn_pairs import read_pairs
from loop_formats.schema import ConfigError, fields_of
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.config.sft_config import FixedSetConfig, SftConfig
from loop_recipes.rollouts.fixed_set import FixedSet, read_fixed_set
from sft_appworld import SftAppWorldRecipe
from support.counter_node import TOKEN, local_node
from support.small_runs import config_over, set_up

TOKEN_ENV = "LOOP_TEST_TOKEN"


@pytest.fixture
async def trees(policy, tmp_path, monkeypatch, capsys):
    """The folder of pairs, and the config they were sampled with."""
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        file = config_over(local.url, policy, tmp_path, TOKEN_ENV, 60.0)
        command = [str(file), f"output_dir={tmp_path / 'trees'}", "--iterations", "6"]
        assert await local.call(search_trees.main, command) == 0
        first, asked = capsys.readouterr().out, len(local.vllm.requests)
        assert await local.call(search_trees.main, command) == 0
        assert capsys.readouterr().out == first
        assert len(local.vllm.requests) == asked, "the second time nothing was sampled"
    return tmp_path / "trees/turn_pairs", file


def sft_section(file, folder, output_dir, **changes):
    loop = OmegaConf.load(file)
    own = {
        "output_dir": str(output_dir),
        "rollouts": {"logs": [str(folder)]},
        "samples": {"_component_": "loop_contrib.paired_samples.TurnPairs", "file": str(folder / "pairs.jsonl")},
        "advantage": {"_component_": "loop_recipes.algorithm.preferences.ReturnPairs"},
        "loss": {"_component_": "loop_recipes.algorithm.preferences.DPO", "beta": 1.0},
        "update": {"minibatch_rollouts": 4, "micro_batch_tokens": 4000},
        "max_iterations": 4,
    }
    shared = {key: value for key, value in loop.items() if key in fields_of(SftConfig)}
    return OmegaConf.create({**shared, **own, **changes})


def train(cfg):
    recipe = SftAppWorldRecipe(cfg)
    with set_up(recipe):
        recipe.train()
    return [json.loads(line) for line in open(f"{cfg.output_dir}/metrics.jsonl")]


async def test_the_policy_learns_the_turns_that_were_worth_more(trees, tmp_path):
    """Steps over all pairs lower their loss one after the other, whichever pairs the search has found."""
    folder, file = trees
    pairs = read_pairs(folder / "pairs.jsonl")
    assert pairs
    whole = {"minibatch_rollouts": None, "micro_batch_tokens": 4000}
    lines = train(sft_section(file, folder, tmp_path / "trained", update=whole))
    assert lines[0]["rollouts"] == len({name for pair in pairs for name in (pair.chosen, pair.rejected)})
    losses, margins = ([line[name] for line in lines] for name in ("loss", "preference_margin"))
    assert (losses[0], margins[0]) == (pytest.approx(math.log(2)), 0.0), "the policy is its own reference"
    assert all(after < before for before, after in pairwise(losses))
    assert margins[-1] > 0.0
    assert (tmp_path / "trained/policies/policy-v0004/adapter_model.safetensors").is_file()


async def test_a_sample_is_one_turn_after_all_that_came_before_it(trees):
    folder, _ = trees
    fixed_set = read_fixed_set(FixedSetConfig(logs=[str(folder)]), TurnPairs(str(folder / "pairs.jsonl")))
    rollouts = {rollout.rollout_id: rollout for rollout in fixed_set.rollouts}
    samples = fixed_set.samples(UpdateConfig(), "")
    for pair, (chosen, rejected) in zip(
        read_pairs(folder / "pairs.jsonl"), zip(samples[::2], samples[1::2], strict=True), strict=True
    ):
        assert chosen.task_id == rejected.task_id
        assert chosen.reward > rejected.reward
        for sample, name in ((chosen, pair.chosen), (rejected, pair.rejected)):
            rollout = rollouts[name]
            turn = rollout.turns[pair.turn - rollout.turns_before]
            assert sample.token_ids.tolist() == rollout.token_ids[: turn.end]
            assert sample.mask.nonzero().flatten().tolist() == list(range(turn.start, turn.end))
            assert sample.turns == 1
            assert torch.equal(sample.sampler_logprobs, torch.tensor(rollout.sampler_logprobs[turn.start : turn.end]))
    longest = max(sample.tokens for sample in samples)
    assert len(fixed_set.samples(UpdateConfig(max_tokens_per_rollout=longest - 1), "")) < len(samples)
    with pytest.raises(ConfigError, match="no pair of turns is so early"):
        fixed_set.samples(UpdateConfig(max_tokens_per_rollout=1), "")
    fixed_set.maker._pairs = fixed_set.maker._pairs[:1] * 2
    again = FixedSet(fixed_set.rollouts, fixed_set.maker)
    twice = again.samples(UpdateConfig(), "")
    assert len({sample.episode for sample in twice}) == len({sample.rollout_id for sample in twice}) == 4
    assert len({sample.task_id for sample in twice}) == 2, "a turn of two pairs is compared in each by itself"
    assert len(again.used(twice)) == 2


async def test_pairs_that_cannot_be_learned_are_refused_by_name(trees, tmp_path):
    folder, file = trees
    likelihood = {"_component_": "loop_recipes.algorithm.losses.LogLikelihood"}
    with pytest.raises(ConfigError, match=r"samples: .*LogLikelihood compares no pairs"):
        train(sft_section(file, folder, tmp_path / "trained", loss=likelihood))
    absent = {"_component_": "loop_contrib.paired_samples.TurnPairs", "file": str(folder / "none.jsonl")}
    with pytest.raises(ConfigError, match=r"samples\.file: .*none\.jsonl does not exist; loop method trees writes"):
        train(sft_section(file, folder, tmp_path / "trained", samples=absent))
    elsewhere = {"logs": [str(tmp_path / "other")]}
    (tmp_path / "other").mkdir()
    (tmp_path / "logs").rename(tmp_path / "other/collections")
    with pytest.raises(ConfigError, match=r"names rollout .*, which is not in rollouts\.logs"):
        train(sft_section(file, folder, tmp_path / "trained", rollouts=elsewhere))
