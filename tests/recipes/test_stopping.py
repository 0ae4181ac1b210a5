"""Signals to a run: what the first, second and third do, and that a resumed run is the one that never stopped."""

import signal
import sys

import pytest
from omegaconf import OmegaConf

import loop_appworld
import sft_appworld
from loop_formats.run_folder import read_metrics
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.run.metrics import MACHINE_KEYS
from loop_recipes.run.stop_request import ANSWERS
from support.signals import signalled
from support.small_runs import replay_config, sft_config

STEPS = 4
"""Of an iteration of :func:`replay_config`: two epochs of the ten rollouts that have signal."""


@pytest.fixture
def run(monkeypatch):
    """Run a recipe as `tune run` does; returns its status."""

    def of(recipe, file, *words):
        monkeypatch.setattr(sys, "argv", [recipe.__name__, "--config", str(file), *words])
        return recipe.recipe_main()

    return of


def numbers(run):
    """The lines of its metrics, without what the clock and the machine make."""
    lines = read_metrics(run)
    return [{k: v for k, v in line.items() if "seconds" not in k and k not in MACHINE_KEYS} for line in lines]


def assert_the_same(one, two, last):
    assert numbers(one) == numbers(two)
    files = sorted((one / "checkpoints" / last).glob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (two / "checkpoints" / last / file.name).read_bytes(), file.name


@pytest.mark.parametrize("at", [1, STEPS - 1, STEPS + 2], ids=["first iteration", "last but one", "second iteration"])
def test_a_second_signal_leaves_the_update_before_its_next_step(tmp_path, capfd, run, at):
    file, whole, stopped = replay_config(tmp_path, iterations=2), tmp_path / "whole", tmp_path / "stopped"
    assert run(loop_appworld, file, f"output_dir={whole}") == 0
    capfd.readouterr()
    with signalled(at) as taken:
        assert run(loop_appworld, file, f"output_dir={stopped}") == 0
    said = capfd.readouterr().err
    assert len(taken) == at
    iteration, step = divmod(at, STEPS)
    assert all(answer.decode() in said for answer in ANSWERS)
    assert (
        f"stopped before step {step + 1} of {STEPS} of iteration {iteration + 1}; resume_from_checkpoint=True" in said
    )
    assert "Traceback" not in said
    assert len(list((stopped / "checkpoints").glob("*"))) == iteration
    assert run(loop_appworld, file, f"output_dir={stopped}", "resume_from_checkpoint=True") == 0
    assert_the_same(stopped, whole, "iteration_0002")


def test_a_second_signal_leaves_the_recomputing_before_its_next_micro_batch(tmp_path, capfd, run):
    file, whole, stopped = replay_config(tmp_path, iterations=2), tmp_path / "whole", tmp_path / "stopped"
    recomputing = {"owner": Scorer, "method": "_logprobs_and_entropy"}
    with signalled(0, **recomputing) as batches:
        assert run(loop_appworld, file, f"output_dir={whole}") == 0
    capfd.readouterr()
    at = len(batches) - 1  # the last but one, of the second iteration
    with signalled(at, **recomputing) as taken, signalled(0) as steps:
        assert run(loop_appworld, file, f"output_dir={stopped}") == 0
    assert (len(taken), len(steps)) == (at, STEPS)
    assert "stopped while recomputing log-probs; resume_from_checkpoint=True" in capfd.readouterr().err
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["iteration_0001"]
    assert run(loop_appworld, file, f"output_dir={stopped}", "resume_from_checkpoint=True") == 0
    assert_the_same(stopped, whole, "iteration_0002")


def test_the_first_signal_ends_the_run_after_the_update_and_so_does_a_second_in_its_last_step(
    tmp_path, capfd, run, caplog
):
    file = replay_config(tmp_path, iterations=2)
    for name, at, signals in (("one", 2, [signal.SIGINT]), ("two", STEPS, [signal.SIGINT] * 2)):
        caplog.clear()
        with signalled(at, signals) as taken:
            assert run(loop_appworld, file, f"output_dir={tmp_path / name}") == 0
        assert len(taken) == STEPS
        assert "stopped after iteration 1: asked to; resume_from_checkpoint=True goes on" in caplog.text
        assert "to serve" not in caplog.text
        assert capfd.readouterr().err.count("\nstopping ") == len(signals)
        assert [path.name for path in (tmp_path / name / "checkpoints").iterdir()] == ["iteration_0001"]


def test_training_on_stored_rollouts_stops_and_goes_on_alike(tmp_path, capfd, run):
    file, whole, stopped = tmp_path / "sft.yaml", tmp_path / "whole", tmp_path / "stopped"
    OmegaConf.save(sft_config(tmp_path), file)
    with signalled(0) as taken:
        assert run(sft_appworld, file, f"output_dir={whole}") == 0
    steps = len(taken) // 3
    with signalled(steps + 1):
        assert run(sft_appworld, file, f"output_dir={stopped}") == 0
    assert f"sft_appworld: stopped before step 2 of {steps} of iteration 2; " in capfd.readouterr().err
    assert run(sft_appworld, file, f"output_dir={stopped}", "resume_from_checkpoint=True") == 0
    assert_the_same(stopped, whole, "iteration_0003")
