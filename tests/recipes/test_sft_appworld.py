"""Training on a fixed set: the loss by hand, exact resume, pairs against the policy it began with, refusals."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import sft_appworld
from loop_formats.ids import branch_id, dev_id, evaluation_id, replay_id, share_id
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.learner import Learner
from loop_recipes.config.sft_config import FixedSetConfig
from loop_recipes.rollouts.fixed_set import read_fixed_set
from sft_appworld import SftAppWorldRecipe
from support.deaths import Killed
from support.sft_runs import PAIRS, STEP, STEPS, check_resumed, train
from support.small_runs import set_up, sft_config


def test_the_first_loss_is_the_cross_entropy_of_the_solved_rollouts(tmp_path):
    cfg = sft_config(tmp_path, max_iterations=2)
    cfg["update"]["minibatch_rollouts"] = None
    first, second = train(cfg)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    logprobs = []
    for log in sorted((tmp_path / "collections").glob("*.jsonl")):
        for rollout in map(json.loads, log.read_text().splitlines()):
            if rollout["success"]:
                with torch.no_grad():
                    predicted = model(torch.tensor([rollout["token_ids"]])).logits[0, :-1].log_softmax(-1)
                chosen = predicted.gather(1, torch.tensor(rollout["token_ids"][1:])[:, None])[:, 0]
                logprobs.append(chosen[torch.tensor(rollout["mask"][1:], dtype=torch.bool)])
    assert first["rollouts"] == len(logprobs) == 8
    assert first["success"] == 1.0
    assert first["loss"] == pytest.approx(-torch.cat(logprobs).mean().item(), rel=1e-5)
    assert second["loss"] < first["loss"]
    assert sorted(path.name for path in (tmp_path / "run/policies").iterdir()) == ["policy-v0001", "policy-v0002"]


@pytest.mark.parametrize(
    "changes",
    [{}, {**PAIRS, "update": STEPS}],
    ids=["cross_entropy", "dpo"],
)
def test_resuming_after_death_in_mid_epoch_equals_never_stopping(tmp_path, changes):
    check_resumed(tmp_path, changes)


def test_a_resumed_run_takes_the_optimizers_options_from_its_config(tmp_path):
    cfg = sft_config(tmp_path)
    whole = train(cfg, f"output_dir={tmp_path / 'whole'}", "optimizer.lr=2e-3")
    with pytest.raises(Killed):
        train(cfg, "optimizer.lr=1e-3", die_at_step=2 * whole[0]["steps"])
    resumed = train(cfg, "optimizer.lr=2e-3", "resume_from_checkpoint=True")
    rates = [line["learning_rate"] for line in whole]
    assert [line["learning_rate"] for line in resumed] == [rates[0] / 2, *rates[1:]]


def test_a_resumed_run_has_the_adapters_scale_that_it_was_begun_with(tmp_path):
    cfg = sft_config(tmp_path)
    train(cfg, "max_iterations=1")
    with pytest.raises(ConfigError, match=r"the checkpoint's adapter has lora_alpha 16; make model.lora_alpha 16"):
        train(cfg, "model.lora_alpha=8", "resume_from_checkpoint=True")


def test_a_policy_is_exported_before_its_iteration_counts_as_done(tmp_path, monkeypatch):
    """A resumed run never comes back to an iteration that was saved."""
    cfg = sft_config(tmp_path, max_iterations=2)

    def die(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "export", die)
        with pytest.raises(Killed):
            train(cfg, "export_every=2")
    train(cfg, "export_every=2", "resume_from_checkpoint=True")
    assert [path.name for path in (tmp_path / "run/policies").iterdir()] == ["policy-v0002"]


def test_pairs_are_learned_against_the_policy_that_the_run_began_with(tmp_path):
    lines = train(sft_config(tmp_path, **PAIRS, update=STEP, max_iterations=6))
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    losses, margins = ([line[name] for line in lines] for name in ("loss", "preference_margin"))
    assert all(after < before for before, after in pairwise(losses)), "every step is over all pairs"
    assert all(after > before for before, after in pairwise(margins)), "the reference stays"


def test_a_runs_folder_is_learned_from_without_its_scores_and_branches(tmp_path):
    """`make demo` leaves the rollouts of its evaluation, on held-out tasks, inside the run's own folder."""
    sft_config(tmp_path)
    train_logs = sorted((tmp_path / "collections").glob("*.jsonl"))
    learned = read_fixed_set(FixedSetConfig([str(tmp_path)]))
    evaluation = tmp_path / "evaluation/node/collections"
    evaluation.mkdir(parents=True)
    names = [
        dev_id("made-up", 1, "[]"),
        share_id(dev_id("made-up", 2, "[]"), 1, 2),
        evaluation_id("after", "[]"),
        replay_id(evaluation_id("after", "[]"), "reach3_1"),
        branch_id("made-up-i0001", "[]"),
    ]
    for name in names:
        (evaluation / f"{name}.jsonl").write_text(train_logs[0].read_text())
    assert read_fixed_set(FixedSetConfig([str(tmp_path)])).digest == learned.digest
    with pytest.raises(ConfigError, match=r"rollouts\.logs: no rollouts, or only scores and branches, are there"):
        read_fixed_set(FixedSetConfig([str(tmp_path / "evaluation")]))
    by_name = read_fixed_set(FixedSetConfig([str(evaluation / f"{names[2]}.jsonl")]))
    assert len(by_name.rollouts) == len(train_logs[0].read_text().splitlines())


CLIPPED = "loss._component_=loop_recipes.algorithm.losses.ClippedPolicyLoss"


def test_a_set_that_cannot_be_trained_on_is_refused_by_name(tmp_path):
    cfg = sft_config(tmp_path)
    for words, message in (
        ([f"rollouts.logs=[{tmp_path}/nowhere]"], r"rollouts\.logs: .*/nowhere is not a log of rollouts"),
        (
            [f"rollouts.logs=[{tmp_path}/collections/made-up-i0001.jsonl,{tmp_path}]"],
            r"rollout \['made-up-i0001/.*'\] is there twice",
        ),
        ([CLIPPED], r"ClippedPolicyLoss needs rollouts of the policy in training"),
        (["update.exact_entropy=True"], r"update\.exact_entropy must be left out"),
        (
            ["update.min_abs_advantage=9"],
            r"rollouts\.logs: none of \d+ rollouts counts under .*: Solved takes",
        ),
        (["update.max_tokens_per_rollout=1"], r"max_tokens_per_rollout is 1, and none of \d+ rollouts"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(cfg, *words)
    train(cfg, "max_iterations=1")
    log = tmp_path / "collections/made-up-i0001.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ConfigError, match="holds other rollouts than the run was started with"):
        train(cfg, "resume_from_checkpoint=True")


@pytest.mark.fault("supervised training that runs out of memory")
def test_out_of_memory_is_one_line_with_the_key_to_lower(tmp_path, monkeypatch):
    def full(self, samples, iteration):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0 has")

    cfg = sft_config(tmp_path)
    monkeypatch.setattr("loop_recipes.algorithm.policy_update.PolicyUpdate.train", full)
    said = sft_appworld.recipe_main.__wrapped__(cfg)
    assert said.startswith("sft_appworld: out of memory on cpu of rank 0, in micro-batches of up to 150 tokens")
    assert "lower update.micro_batch_tokens, then update.max_tokens_per_rollout; " in said


def write_chats(folder: Path, count: int = 20, **more: object) -> Path:
    """Made-up conversations that all end in the same way; ``more`` is said of each answer."""
    file = folder / "chats.jsonl"
    said = {"role": "assistant", "content": "counter done: add(3)", **more}
    lines = [json.dumps({"messages": [{"role": "user", "content": f"add {n}"}, said]}) for n in range(count)]
    file.write_text("\n".join(lines))
    return file


def test_conversations_are_trained_on_and_seen_and_some_are_held_out(tmp_path):
    cfg = sft_config(tmp_path, data=str(write_chats(tmp_path)), held_out=0.3, optimizer={"lr": 0.01})
    cfg.optimizer["_component_"] = "torch.optim.AdamW"
    lines = train(cfg)
    losses = [line["held_out_loss"] for line in lines]
    assert losses[0] > losses[1] > losses[2]
    logs = [read_rollouts(log) for log in find_logs(tmp_path / "run")]
    assert sum(map(len, logs)) == 20
    assert {rollout.collection_id for log in logs for rollout in log} == {"data_trained", "data_held_out"}
    assert lines[0]["dataset"] == "chats"


def test_a_resumed_run_on_conversations_is_the_same_run(tmp_path):
    cfg = sft_config(tmp_path, data=[str(write_chats(tmp_path))], held_out=0.3)
    whole = train(cfg)
    with pytest.raises(Killed):
        train(cfg, f"output_dir={tmp_path / 'again'}", die_at_step=7)
    assert train(cfg, f"output_dir={tmp_path / 'again'}", "resume_from_checkpoint=True") == whole


@pytest.mark.parametrize("words", [{"held_out": 0.2}, {"turns": "last"}])
def test_keys_of_conversations_without_any_are_refused(tmp_path, words):
    with pytest.raises(ConfigError, match="turns and held_out are for conversations: give data"):
        SftAppWorldRecipe(sft_config(tmp_path, **words))


def test_a_conversation_that_cannot_be_read_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "boss"}]}')
    monkeypatch.setattr(SftAppWorldRecipe, "_load_base", lambda self: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"data: .*chats\.jsonl:1: messages\[0\]\.role is 'boss'"):
        SftAppWorldRecipe(sft_config(tmp_path, data=str(file))).setup()


def test_the_loss_of_a_token_is_multiplied_by_the_weight_of_its_turn(tmp_path):
    def first_loss(name, **more):
        (tmp_path / name).mkdir()
        cfg = sft_config(tmp_path / name, data=str(write_chats(tmp_path / name, **more)), max_iterations=1)
        cfg.optimizer.lr = 0.0
        return train(cfg)[0]["loss"]

    whole, quarter = first_loss("whole"), first_loss("quarter", weight=0.25)
    assert quarter == pytest.approx(whole / 4)


def test_weights_are_of_turns_and_follow_a_cut(tmp_path):
    [said, other] = [
        {"role": "assistant", "content": text, "weight": weight} for text, weight in (("a", 0.5), ("b", 2))
    ]
    ask = {"role": "user", "content": "add"}
    file = tmp_path / "chats.jsonl"
    file.write_text(
        "\n".join(json.dumps({"messages": m}) for m in ([ask, said, ask, other], [ask, {**said, "weight": 1}]))
    )
    recipe = SftAppWorldRecipe(sft_config(tmp_path, data=str(file)))
    with set_up(recipe):
        mixed, plain = sorted(recipe._samples, key=lambda sample: sample.rollout_id)
        turns = mixed.turn_ids[mixed.mask]
        assert torch.equal(mixed.token_advantages, torch.where(turns == 0, 0.5, 2.0))
        assert torch.equal(plain.token_advantages, torch.ones(int(plain.mask.sum())))
        [cut] = recipe._read_set().weighted([mixed.beginning(int(mixed.mask.nonzero()[1]))])
        assert cut.token_advantages.tolist() == [0.5]


def test_weights_in_part_are_refused_for_pairs(tmp_path):
    cfg = sft_config(tmp_path, data=str(write_chats(tmp_path, weight=0.25)), **PAIRS, update=STEPS)
    with pytest.raises(ConfigError, match=r"^data: .*chats\.jsonl:1: weights of its turns are for LogLikelihood"):
        SftAppWorldRecipe(cfg).setup()
