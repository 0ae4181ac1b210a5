"""AgentEvol's rounds: a set that grows, a base that stays, and what a second start repeats."""

import json
from pathlib import Path

import pytest

from loop_contrib.agent_evol import agent_evol
from loop_formats.run_files import ADAPTER_FILES
from loop_recipes import steps
from loop_recipes.steps import StepFailed
from support.small_runs import stored_rollout
from support.texts import texts_beside

TABLES = texts_beside(__file__)

COMMAND = ["collection.split=train:1", "--training", "tiny_cpu", "seed=5"]
ITERATIONS = 3


class Commands:
    """In place of the commands: leaves behind what they would; ``fail_at`` of them is never done."""

    def __init__(self, fail_at=None, solved=True, iterations=ITERATIONS):
        self.commands, self.fail_at, self.solved, self.iterations = [], fail_at, solved, iterations

    def __call__(self, command, log, deadline_s=None):
        self.commands.append(command)
        if len(self.commands) == self.fail_at:
            raise StepFailed("killed")
        folder = Path(next(word for word in command if word.startswith("output_dir=")).removeprefix("output_dir="))
        if "sft_appworld" in command:
            policy = folder / f"policies/policy-v{self.iterations:04d}"
            policy.mkdir(parents=True)
            for name in ADAPTER_FILES:
                (policy / name).touch()
            (folder / "config.yaml").write_text(f"max_iterations: {ITERATIONS}\n")
            (folder / "metrics.jsonl").write_text(json.dumps({"iteration": self.iterations}) + "\n")
            return
        collections = folder / "solved/collections"
        collections.mkdir(parents=True, exist_ok=True)
        if self.solved:
            rollout = stored_rollout(folder.name, "task_1", 0, 0, 1.0, 50, 1)
            (collections / f"{folder.name}.jsonl").write_text(rollout.to_json() + "\n")


def run(monkeypatch, out, commands, *words, rounds=2, config="tiny_cpu"):
    monkeypatch.setattr(steps, "run_step", commands)
    return agent_evol.main([config, f"output_dir={out}", *COMMAND, "--rounds", str(rounds), *words])


def said(command, key):
    return next((word.removeprefix(f"{key}=") for word in command if word.startswith(f"{key}=")), None)


def test_the_set_grows_and_each_training_begins_at_the_base(monkeypatch, tmp_path, capsys):
    played = Commands()
    assert run(monkeypatch, tmp_path, played, "--", "max_iterations=3") == 0
    first, first_training, second, second_training = played.commands
    assert said(first, "initial_adapter") is None
    assert said(second, "initial_adapter") == f"{tmp_path}/round_01/trained/policies/policy-v0003"
    assert [said(command, "seed") for command in (first, second)] == ["5", "6"]
    assert [said(command, "collection.split") for command in (first, second)] == ["train:1", "train:1"]
    assert said(first_training, "rollouts.logs") == f"[{tmp_path}/round_01/solved]"
    assert said(second_training, "rollouts.logs") == f"[{tmp_path}/round_01/solved,{tmp_path}/round_02/solved]"
    assert said(second_training, "initial_adapter") is None
    assert said(second_training, "max_iterations") == "3"
    assert f"newest policy: {tmp_path}/round_02/trained/policies/policy-v0003" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), TABLES["what_a_later_step_would_refuse_is_said_before_the_first"])
def test_what_a_later_step_would_refuse_is_said_before_the_first(monkeypatch, tmp_path, capsys, words, message):
    played = Commands()
    assert run(monkeypatch, tmp_path / "out", played, *words) == 1
    assert played.commands == []
    assert message in capsys.readouterr().err


def test_a_config_that_is_not_there_is_said_before_the_first_step(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path / "out", Commands(), config="nosuch") == 1
    assert "no config 'loop_appworld/nosuch'" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["{", "[1]"])
def test_a_damaged_list_of_steps_is_one_line(monkeypatch, tmp_path, capsys, damaged):
    (tmp_path / "steps.json").write_text(damaged)
    assert run(monkeypatch, tmp_path, Commands()) == 1
    assert capsys.readouterr().err == f"loop method evol: {tmp_path}/steps.json is damaged; remove it to begin again\n"


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_second_start_repeats_only_the_step_that_was_not_done(monkeypatch, tmp_path, capsys, fail_at):
    whole, before, after = Commands(), Commands(fail_at), Commands()
    run(monkeypatch, tmp_path / "whole", whole)
    assert run(monkeypatch, tmp_path / "run", before) == 1
    assert "killed" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path / "run", after) == 0
    done = [*before.commands[: fail_at - 1], *after.commands]
    wanted = [[word.replace("/whole/", "/run/") for word in command] for command in whole.commands]
    assert [[word.replace("/whole/", "/run/") for word in command] for command in done] == wanted
    again = Commands()
    assert run(monkeypatch, tmp_path / "run", again) == 0
    assert again.commands == []
    assert run(monkeypatch, tmp_path / "run", again, rounds=3) == 0
    assert len(again.commands) == 2


def test_a_training_that_was_asked_to_stop_is_not_done(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, Commands(iterations=1)) == 1
    assert "was stopped after iteration 1 of 3; the same command goes on from there" in capsys.readouterr().err


def test_what_cannot_go_on_is_refused(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path / "hard", Commands(solved=False)) == 1
    assert "no task is solved, so there is nothing to train on; try more --attempts" in capsys.readouterr().err
    run(monkeypatch, tmp_path / "run", Commands(), rounds=1)
    assert run(monkeypatch, tmp_path / "run", Commands(), "--attempts", "7") == 1
    assert "was begun with another attempts; give the same, or another folder" in capsys.readouterr().err
