"""LOOP with advantages spread over turns, by a critic and by continuations on a node; and what an actor never sees."""

import json
import shutil
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_contrib.sweet_rl.stored_critic import critic_over
from loop_contrib.turn_credit import by_critic
from loop_contrib.turn_credit.by_branches import ByBranches
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import ConfigError, fields_of
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.run.stop_request import StopRequested
from sft_appworld import SftAppWorldRecipe
from support.counter_node import TOKEN, local_node
from support.learner_cases import a_run
from support.ranks import on_ranks
from support.small_runs import config_over, replay_config, set_up, train_into
from support.waiting import DEADLINE_S

TOKEN_ENV = "LOOP_TEST_TOKEN"
SECRETS = {
    "_component_": "loop_contrib.sweet_rl.turn_critic.WithHidden",
    "information": {"_component_": "contrib_support.hidden_tasks.MadeUpSecrets"},
}


def by(what, **arguments):
    """``credit`` of a config."""
    component = f"loop_contrib.turn_credit.by_{what}.By{what.capitalize()}"
    return {"turns": {"_component_": component, **arguments}}


def a_critic(folder, loop):
    """The folder of a critic's run on the stored rollouts of a loop's config, which it is told secrets of."""
    own = {
        "output_dir": str(folder / "critic"),
        "rollouts": {"logs": [str(file) for file in sorted((folder / "logs").glob("*.jsonl"))]},
        "samples": SECRETS,
        "advantage": {"_component_": "loop_recipes.algorithm.preferences.ReturnPairs"},
        "loss": {"_component_": "loop_contrib.sweet_rl.turn_critic.TurnAdvantage", "beta": 1.0},
        "update": {"minibatch_rollouts": 4, "micro_batch_tokens": 300},
        "max_iterations": 1,
    }
    shared = {key: value for key, value in loop.items() if key in fields_of(SftConfig)}
    recipe = SftAppWorldRecipe(OmegaConf.create({**shared, **own}))
    with set_up(recipe):
        recipe.train()
    return folder / "critic"


def trained(cfg):
    """Runs the recipe; returns the samples of every update, as the optimizer's steps got them."""
    recipe, seen = LoopAppWorldRecipe(cfg), []
    recipe._stop.listen = lambda: None  # signals are for main threads
    with set_up(recipe):
        train = recipe._learner.update.train

        def watched(samples, iteration, step_logprobs):
            seen.append(samples)
            return train(samples, iteration, step_logprobs)

        recipe._learner.update.train = watched
        recipe.train()
    return seen


def check_spread(updates, rollouts):
    """The actor's batches are the served ids and nothing else, and the advantages of a rollout keep their mean."""
    served = {rollout.rollout_id: rollout for rollout in rollouts}
    within = []
    for sample in [sample for samples in updates for sample in samples]:
        assert sample.token_ids.tolist() == served[sample.rollout_id].token_ids
        assert sample.mask.tolist() == served[sample.rollout_id].mask
        assert sample.hidden_tokens == 0
        assert sample.token_advantages.mean().item() == pytest.approx(sample.advantage, abs=1e-5)
        within.append(sample.token_advantages.std(correction=0).item())
    assert max(within) > 1e-4
    return within


def test_a_critic_that_sees_secrets_spreads_the_advantages_of_an_actor_that_does_not(tmp_path):
    loop = OmegaConf.load(replay_config(tmp_path, iterations=2))
    rollouts = [rollout for log in sorted((tmp_path / "logs").glob("*.jsonl")) for rollout in read_rollouts(log)]
    loop.credit = by("critic", critic=str(a_critic(tmp_path, loop)))
    updates = trained(loop)
    assert len(updates) == 2
    check_spread(updates, rollouts)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["steps"] for line in lines)


def test_a_resumed_run_keeps_its_critic_though_that_was_trained_on(tmp_path, monkeypatch):
    loop = OmegaConf.load(replay_config(tmp_path, iterations=2))
    critic = a_critic(tmp_path, loop)
    loop.credit = by("critic", critic=str(critic))
    used = []

    def watched(config, scorer, run, adapter):
        used.append(adapter.name)
        return critic_over(config, scorer, run, adapter)

    monkeypatch.setattr(by_critic, "critic_over", watched)
    trained(OmegaConf.merge(loop, {"max_iterations": 1}))
    policies = critic / "policies"
    shutil.copytree(policies / "policy-v0001", policies / "policy-v0002")
    trained(OmegaConf.merge(loop, {"resume_from_checkpoint": True}))
    trained(OmegaConf.merge(loop, {"max_iterations": 1, "output_dir": str(tmp_path / "another")}))
    assert used == ["policy-v0001", "policy-v0001", "policy-v0002"]


def test_rollouts_that_could_outgrow_the_critic_are_refused_before_work(tmp_path):
    loop = OmegaConf.load(replay_config(tmp_path, iterations=1))
    loop.credit = by("critic", critic=str(a_critic(tmp_path, loop)))
    loop.model.max_seq_len = loop.collection.limits.max_context
    with pytest.raises(ConfigError, match=r"max_seq_len is 512; make update\.max_tokens_per_rollout at most"):
        trained(loop)


@pytest.mark.integration
def test_two_ranks_spread_the_advantages_as_one_does(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "LOOP_TRUST", "contrib_support"
    )  # the critic's hidden information, which only its own config names
    config = replay_config(tmp_path, iterations=2)
    loop = OmegaConf.load(config)
    loop.credit = by("critic", critic=str(a_critic(tmp_path, loop)))
    OmegaConf.save(loop, config)
    train_into(config, tmp_path / "one")
    on_ranks(2, train_into, config, tmp_path / "two")
    runs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    for one, two in zip(*(map(json.loads, run) for run in runs), strict=True):
        assert one["steps"] == two["steps"] > 0
        for key in ("advantage_std", "loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), (one["iteration"], key)


async def test_continuations_on_a_node_spread_the_advantages(policy, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        cfg = OmegaConf.load(config_over(local.url, policy, tmp_path, TOKEN_ENV, DEADLINE_S))
        cfg.credit = by("branches", continuations=2)
        cfg.sampler_gap = {"ok": 1e6, "broken": 1e6}  # what the scripted servers claim is made up
        updates = await local.call(trained, cfg)
    rollouts = [rollout for log in find_logs(tmp_path / "node") for rollout in read_rollouts(log)]
    check_spread(updates, [rollout for rollout in rollouts if rollout.branch_of is None])
    gone_on_from = {rollout.branch_of.rollout_id for rollout in rollouts if rollout.branch_of is not None}
    assert {sample.rollout_id for samples in updates for sample in samples} <= gone_on_from


def test_a_stop_while_continuations_are_played_ends_the_run(tmp_path):
    config = read_config(OmegaConf.load(replay_config(tmp_path, iterations=1)), LoopConfig)
    [log] = (tmp_path / "logs").glob("*.jsonl")
    credit = ByBranches(continuations=2)
    credit.setup(replace(a_run(), config=config))  # whose source was asked to stop: it answers None
    with pytest.raises(StopRequested, match="what goes on from the iteration's rollouts"):
        credit.collected(read_rollouts(log), 1)


def test_what_does_not_fit_is_refused_before_work(tmp_path):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))

    def refused(message, **changes):
        with pytest.raises(ConfigError, match=message):
            LoopAppWorldRecipe(OmegaConf.merge(cfg, changes))

    critic = by("critic", critic=str(tmp_path / "nowhere"))
    refused("missing a required argument: 'critic'", credit=by("critic"))
    refused("credit.turns must be left out: stored rollouts cannot be gone on from", credit=by("branches"))
    refused("strength must be above 0", credit=by("branches", strength=0.0))
    shortened = {"limits": {"compaction": "drop"}}
    harness = {"root": "node", "model": {"path": "base"}, "environment": {"name": "harness"}}
    node = {"replay": None, "url": "http://127.0.0.1:1"}
    refused(
        r"credit\.turns must be left out: the node cannot go on from the turns of an agent that is a program",
        credit=by("branches"),
        rollout_node=node,
        node=harness,
    )
    by_branches = {"rollout_node": node, "credit": by("branches")}
    refused("collection.limits.compaction must be null where", collection=shortened, **by_branches)
    refused("must be null: an agent of your own", rollout_node=node, node=harness, collection=shortened)
    refused(r"credit\.turns\.critic .* is not a folder of a run", credit=critic)
    refused("loss.level is 'turn'; credit.turns gives", credit=critic, loss={"level": "turn"})
    to_go = {"_component_": "loop_recipes.algorithm.advantages.ReturnToGo"}
    refused("credit.turns must be left out or come first: .* and advantage gives", credit=critic, advantage=to_go)
    ppo = {"critic": {"_component_": "loop_recipes.algorithm.critic.Critic"}}
    refused("credit.turns must be left out or come first: .* and credit.critic gives", credit={**ppo, **critic})
    refused("credit: rng is not a name", credit={"rng": ppo["critic"]})
    other = {"own": {"_component_": "torch.nn.Identity"}}
    refused("credit.own: torch.nn.Identity is not a Credit; derive it from", credit=other)
    cfg.loss = {"_component_": "loop_recipes.algorithm.preferences.DMPO"}
    cfg.advantage = {"_component_": "loop_recipes.algorithm.preferences.ReturnPairs"}
    refused("credit.critic must be left out: the loss compares pairs", credit=ppo)
