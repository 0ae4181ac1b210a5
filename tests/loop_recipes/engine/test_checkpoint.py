"""Checkpoints: resuming equals never having stopped, bit for bit; damaged ones are refused by name."""

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError

import loop_appworld
from loop_appworld import LoopAppWorldRecipe
from loop_formats.schema import ConfigError
from loop_recipes.engine.checkpoint import (
    TrainingState,
    latest_checkpoint,
    load_latest,
    load_training_state,
    prune_checkpoints,
    save_training_state,
)
from loop_recipes.rollouts.source import NoRollouts
from support.deaths import Killed, deterministic, train_until
from support.small_runs import replay_config


def run(config: Path, *overrides: str, die_at_step: int | None = None) -> None:
    """The recipe in this process; ``die_at_step`` ends it in place of that optimizer step, without any cleanup."""
    cfg = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(list(overrides)))
    train_until(LoopAppWorldRecipe(cfg), die_at_step)


@pytest.mark.parametrize("lag", [0, 1])
def test_resuming_after_death_in_mid_update_equals_never_stopping(tmp_path, lag):
    config = replay_config(tmp_path, iterations=6, stale_by=lag)
    lagging = f"collection.max_policy_lag={lag}"
    run(config, lagging, f"output_dir={tmp_path / 'whole'}")
    with pytest.raises(Killed):
        # Two epochs of two or three minibatches: step 15 lies in the fourth iteration.
        run(config, lagging, f"output_dir={tmp_path / 'broken'}", die_at_step=15)
    assert latest_checkpoint(tmp_path / "broken/checkpoints").name == "iteration_0003"
    run(config, lagging, f"output_dir={tmp_path / 'broken'}", "resume_from_checkpoint=True")

    whole, broken = (tmp_path / name / "checkpoints/iteration_0006" for name in ("whole", "broken"))
    assert len(list(whole.glob("adapter_v*.safetensors"))) == 1 + lag
    for file in sorted(whole.glob("*.safetensors")):
        assert file.read_bytes() == (broken / file.name).read_bytes(), file.name
    states = [json.loads((folder / "state.json").read_text()) for folder in (whole, broken)]
    for state in states:
        del state["config"]
    assert states[0] == states[1]
    metrics = deterministic(tmp_path / "whole/metrics.jsonl")
    assert deterministic(tmp_path / "broken/metrics.jsonl") == metrics
    assert [line["iteration"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["policy_lag"] for line in metrics] == ([0] * 6 if lag == 0 else [0, 1, 1, 1, 1, 1])


def test_the_critic_learns_alone_first_and_resumes_with_the_run(tmp_path):
    critic = {
        "_component_": "loop_recipes.algorithm.critic.Critic",
        "hidden_sizes": [16, 8],
        "warmup_iterations": 2,
        "lr": 1e-2,
    }
    config = replay_config(tmp_path, iterations=4, credit={"critic": critic}, keep_last_checkpoints=4)
    run(config, f"output_dir={tmp_path / 'whole'}")
    with pytest.raises(Killed):
        run(config, f"output_dir={tmp_path / 'broken'}", die_at_step=15)
    run(config, f"output_dir={tmp_path / 'broken'}", "resume_from_checkpoint=True")
    states = [load_training_state(tmp_path / f"whole/checkpoints/iteration_000{n}") for n in (1, 2, 3)]
    alone, still_alone, together = [state.adapters[state.state["policy_version"]] for state in states]
    assert all(torch.equal(tensor, still_alone[name]) for name, tensor in alone.items())
    assert any(not torch.equal(tensor, together[name]) for name, tensor in alone.items())
    assert not torch.equal(states[0].further["critic"]["mlp.0.weight"], states[1].further["critic"]["mlp.0.weight"])
    metrics = deterministic(tmp_path / "whole/metrics.jsonl")
    assert metrics == deterministic(tmp_path / "broken/metrics.jsonl")
    assert metrics[-1]["value_loss"] < metrics[0]["value_loss"]
    assert metrics[0]["kept_fraction"] == 1.0
    resume = (f"output_dir={tmp_path / 'whole'}", "resume_from_checkpoint=True")
    with pytest.raises(ConfigError, match=r"of a run that trained critic beside the policy, .* would train nothing"):
        run(replay_config(tmp_path, iterations=4), *resume)
    config = replay_config(tmp_path, iterations=4, credit={"critic": critic})
    with pytest.raises(ConfigError, match=r"^credit\.critic: the checkpoint's weights have other sizes"):
        run(config, *resume, "credit.critic.hidden_sizes=[16,9]")


def test_a_stop_file_saves_and_ends_the_run(tmp_path, caplog):
    config = replay_config(tmp_path, iterations=3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    run(config)
    assert latest_checkpoint(tmp_path / "run/checkpoints").name == "iteration_0001"
    assert not (tmp_path / "run/stop").exists()
    assert "stopped after iteration 1: asked to" in caplog.text


def test_a_stop_file_that_comes_in_the_last_iteration_does_not_stop_a_longer_run(tmp_path):
    config = replay_config(tmp_path, iterations=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    run(config, "max_iterations=1")
    assert not (tmp_path / "run/stop").exists()


def test_what_was_asked_for_ahead_is_taken_by_a_run_that_is_resumed_without_lag(tmp_path):
    config = replay_config(tmp_path, iterations=4, stale_by=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    run(config, "collection.max_policy_lag=1")
    run(config, "resume_from_checkpoint=True", "max_iterations=2")
    assert [line["policy_lag"] for line in deterministic(tmp_path / "run/metrics.jsonl")] == [0, 1]
    with pytest.raises(NoRollouts, match="the update takes 2 to 2"):
        run(config, "resume_from_checkpoint=True")


def test_a_run_without_signal_stops_with_that_reason(tmp_path, caplog):
    config = replay_config(
        tmp_path, iterations=6, stale_by=9, stop={"iterations_without_signal": 2}, update={"min_abs_advantage": 9.0}
    )
    run(config)
    assert "stopped after iteration 2: 2 iterations without signal" in caplog.text
    assert "nothing was learned: no step was made in 2 iterations, because no rollout was kept" in caplog.text
    state = load_training_state(tmp_path / "run/checkpoints/iteration_0002").state
    assert (state["policy_version"], state["iteration"]) == (0, 2)


def test_a_damaged_checkpoint_is_refused_and_a_half_written_one_never_seen(tmp_path):
    training = TrainingState({"policy_version": 1}, {1: {"a": torch.ones(2)}}, {}, {"rank0": torch.zeros(1)})
    folder = save_training_state(tmp_path, 1, training)
    assert torch.equal(load_training_state(folder).adapters[1]["a"], torch.ones(2))
    (tmp_path / ".partial-0002").mkdir()
    assert latest_checkpoint(tmp_path) == folder
    (folder / "optimizer.safetensors").write_bytes(b"\0" * 20)
    damage = r"cannot be read \(optimizer.safetensors is not as it was written\)"
    with pytest.raises(ConfigError, match=f"checkpoint {folder} {damage}; remove it to start from the beginning"):
        load_training_state(folder)
    later = save_training_state(tmp_path, 2, training)
    state = (later / "state.json").read_bytes()
    (later / "state.json").write_bytes(state.replace(b": 1", b": 0"))
    with pytest.raises(ConfigError, match=r"state.json is not as .* go on from iteration_0001"):
        load_training_state(later)
    (later / "SHA256SUMS").unlink()  # as earlier versions wrote checkpoints
    with pytest.raises(ConfigError, match="it lacks the adapter of its policy version 0"):
        load_training_state(later)
    (later / "state.json").write_bytes(state)
    assert load_training_state(later).state == {"policy_version": 1}
    shutil.rmtree(later)
    shutil.rmtree(folder)
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("where", ["engine.checkpoint.save_file", "run.metrics.append_to"])
def test_a_full_disk_is_one_line_and_a_resumed_run_has_lost_nothing(tmp_path, monkeypatch, where):
    def full(*_, **__):
        if where == "engine.checkpoint.save_file":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = replay_config(tmp_path, iterations=2)
    run(config, f"output_dir={tmp_path / 'whole'}")
    run(config, "max_iterations=1")
    with monkeypatch.context() as patches:
        patches.setattr(f"loop_recipes.{where}", full)
        patches.setattr(sys, "argv", ["loop_appworld.py", "--config", str(config), "resume_from_checkpoint=True"])
        status = loop_appworld.recipe_main()
    line = r"loop_appworld: cannot write \S+: .*No space left on device.*; free some space .*: nothing .* is lost"
    assert re.fullmatch(line, status)
    run(config, "resume_from_checkpoint=True")
    assert deterministic(tmp_path / "run/metrics.jsonl") == deterministic(tmp_path / "whole/metrics.jsonl")


def test_a_checkpoint_that_was_just_being_replaced_is_found_where_it_is(tmp_path, monkeypatch):
    """The process dies between the two renames that a file system without exchange needs, with one checkpoint kept."""
    monkeypatch.setattr("loop_formats.run_files._exchange", lambda one, other: False)
    training = TrainingState({"policy_version": 1}, {1: {"a": torch.ones(2)}}, {}, {"rank0": torch.zeros(1)})
    save_training_state(tmp_path, 9999, training)
    folder = save_training_state(tmp_path, 10000, training)
    folder.rename(tmp_path / f".{folder.name}.replaced.partial")
    assert load_latest(tmp_path).state == {"policy_version": 1}
    assert latest_checkpoint(tmp_path).name == ".iteration_10000.replaced.partial"
    save_training_state(tmp_path, 10001, training)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_10000", "iteration_10001", "iteration_9999"]


def test_old_checkpoints_go_but_not_the_best(tmp_path):
    training = TrainingState({"policy_version": 1}, {1: {"a": torch.ones(2)}}, {}, {"rank0": torch.zeros(1)})
    for iteration in range(1, 6):
        save_training_state(tmp_path, iteration, training)
    prune_checkpoints(tmp_path, keep_last=2, keep={2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_0002", "iteration_0004", "iteration_0005"]


@pytest.mark.fault("a folder that cannot be removed")
@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EBUSY, errno.EACCES, None], ids=lambda code: str(code))
def test_a_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch, caplog, code):
    """A network file system holds on to an open file, or the folder is a link to an archive (None)."""
    training = TrainingState({"policy_version": 0}, {0: {}}, {}, {})
    for iteration in range(1, 5):
        save_training_state(tmp_path, iteration, training)
    first = tmp_path / "iteration_0001"
    if code is None:
        first.rename(tmp_path / "archive")
        first.symlink_to("archive")
    rmtree = shutil.rmtree

    def refusing(path, *args, **kwargs):
        if code is not None and Path(path) == first:
            raise OSError(code, os.strerror(code), str(path))
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    for _ in range(2):
        prune_checkpoints(tmp_path, keep_last=2)
    left = ["archive"] if code is None else ["iteration_0001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "iteration_0003", "iteration_0004"]
    assert caplog.text.count("cannot be removed") == (code is not None)
    code = None
    prune_checkpoints(tmp_path, keep_last=2)
    assert not first.exists()
