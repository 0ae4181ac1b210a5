"""SWEET-RL's actor: candidates from a node, ranked by a critic that sees secrets, learned by a policy that does not."""

import json
from types import SimpleNamespace

import torch
from omegaconf import OmegaConf

from contrib_support.hidden_tasks import MadeUpSecrets
from loop_contrib.sweet_rl import rank_turns
from loop_contrib.sweet_rl.turn_candidates import pairs_of
from loop_contrib.sweet_rl.turn_critic import HiddenPrefix
from loop_contrib.turn_pairs import read_pairs
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import fields_of
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.engine.peft_export import write_empty_adapter
from model_families.chat import open_chat
from sft_appworld import SftAppWorldRecipe
from support.counter_node import TOKEN, counter_request, local_node
from support.small_runs import config_over, set_up
from support.waiting import DEADLINE_S

TOKEN_ENV = "LOOP_TEST_TOKEN"


def train(loop, output_dir, rollouts, **changes):
    own = {
        "output_dir": str(output_dir),
        "rollouts": rollouts,
        "advantage": {"_component_": "loop_recipes.algorithm.preferences.ReturnPairs"},
        "update": {"minibatch_rollouts": 8, "micro_batch_tokens": 4000},
        "max_iterations": 1,
    }
    shared = {key: value for key, value in loop.items() if key in fields_of(SftConfig)}
    recipe = SftAppWorldRecipe(OmegaConf.create({**shared, **own, **changes}))
    recipe._stop.listen = lambda: None  # signals are for main threads
    with set_up(recipe):
        samples = recipe._samples
        recipe.train()
    return samples


async def test_a_critic_ranks_what_a_node_samples_and_nobody_else_sees_what_is_hidden(
    policy, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    base = write_empty_adapter(tmp_path / "base_policy", str(policy / "model"))
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        await local.call(local.client.publish_policy, 0, base)  # the policy that the command serves too
        await local.collect(counter_request("demo-i0001", tasks=["reach3_1", "reach5_1"], rollouts_per_task=4))
        (log,) = find_logs(tmp_path / "node")
        file = config_over(local.url, policy, tmp_path, TOKEN_ENV, DEADLINE_S)
        loop = OmegaConf.load(file)
        loss = {"_component_": "loop_contrib.sweet_rl.turn_critic.TurnAdvantage", "beta": 1.0}
        stored = {"logs": [str(log)]}
        information = {"_component_": "contrib_support.hidden_tasks.MadeUpSecrets"}
        secrets = {"_component_": "loop_contrib.sweet_rl.turn_critic.WithHidden", "information": information}
        await local.call(lambda: train(loop, tmp_path / "critic", stored, loss=loss, samples=secrets))
        command = [str(file), f"output_dir={tmp_path / 'ranked'}", "--logs", str(log), "--most", "3"]
        command += ["--critic", str(tmp_path / "critic"), "--candidates", "6", "--pairs", "2"]
        assert await local.call(rank_turns.main, command) == 0, capsys.readouterr().err
        asked = len(local.vllm.requests)
        assert await local.call(rank_turns.main, command) == 0
        assert len(local.vllm.requests) == asked, "the second time nothing was sampled"
        served = [request["token_ids"] for request in local.vllm.requests]
    folder = tmp_path / "ranked/turn_pairs"
    pairs = read_pairs(folder / "pairs.jsonl")
    candidates = {rollout.rollout_id: rollout for file in find_logs(folder) for rollout in read_rollouts(file)}
    origins = {rollout.rollout_id: rollout for rollout in read_rollouts(log)}
    assert pairs
    for pair in pairs:
        chosen, rejected = candidates[pair.chosen], candidates[pair.rejected]
        assert pair.chosen_value > pair.rejected_value
        origin = origins[chosen.branch_of.rollout_id]
        before = origin.token_ids[: origin.turns[pair.turn].start]
        for candidate in (chosen, rejected):
            (turn,) = candidate.turns
            assert candidate.token_ids[: turn.start] == before, "the ids that were served"
            assert candidate.branch_of == chosen.branch_of

    loss = {"_component_": "loop_recipes.algorithm.preferences.DPO", "nll": 0.01}
    turns = {"_component_": "loop_contrib.paired_samples.TurnPairs", "file": str(folder / "pairs.jsonl")}
    samples = train(loop, tmp_path / "actor", {"logs": [str(folder)]}, loss=loss, samples=turns)
    assert len(samples) == 2 * len(pairs)
    tokens = open_chat(policy / "model")
    (told, *_) = HiddenPrefix(MadeUpSecrets(), tokens).before(samples)
    assert "the answer of" in tokens.decode(told.token_ids.tolist())
    for ids in [*served, *(sample.token_ids.tolist() for sample in samples)]:
        assert "the answer of" not in tokens.decode(ids)
    lines = [json.loads(line) for line in (tmp_path / "actor/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["steps"] >= 1


def test_the_chosen_are_of_the_better_half_and_nobody_is_in_two_pairs():
    def candidate(n, word):
        turns = [SimpleNamespace(start=2, end=3)]
        return SimpleNamespace(rollout_id=f"c/task/{n}.0", task_id="task", turns=turns, token_ids=[7, 7, word])

    candidates = [candidate(n, word=n) for n in range(9)]
    values = {candidate.rollout_id: torch.tensor([float(n)]) for n, candidate in enumerate(candidates)}
    pairs = list(pairs_of(("origin", 2), candidates, values, 3, seed=1))
    assert len(pairs) == 3
    assert all(pair.chosen_value >= 5 and pair.rejected_value <= 3 and pair.turn == 2 for pair in pairs)
    assert len({name for pair in pairs for name in (pair.chosen, pair.rejected)}) == 6
    assert pairs == list(pairs_of(("origin", 2), candidates, values, 3, seed=1))
    alike = dict.fromkeys(values, torch.tensor([0.5]))
    assert list(pairs_of(("origin", 2), candidates, alike, 3, seed=1)) == []
    of_the_same_words = [candidate(n, word=1) for n in range(9)]
    assert list(pairs_of(("origin", 2), of_the_same_words, values, 3, seed=1)) == []


def test_bad_options_are_one_line(tmp_path, capsys):
    command = ["tiny_cpu", "--logs", str(tmp_path), "--critic", str(tmp_path)]
    assert rank_turns.main([*command, "--candidates", "1"]) == 1
    assert "--candidates is 1; it must be at least 2" in capsys.readouterr().err
    assert rank_turns.main(command) == 1
    assert "is not a log of rollouts" in capsys.readouterr().err
