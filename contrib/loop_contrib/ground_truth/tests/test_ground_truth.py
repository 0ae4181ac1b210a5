"""Ground truth as rollouts: the synthetic world's solutions, token by token as an episode would be served."""

import pytest

from appworld_adapter.dataset import load_split
from appworld_adapter.ground_truth import load_solution
from appworld_adapter.prompt import Prompt, TaskCard
from loop_contrib.ground_truth.ground_truth import main
from loop_formats.places import loop_home
from loop_formats.run_files import read_rollouts
from loop_recipes.paths import loop_package
from model_families.chat import open_chat

WORLD = loop_home() / "worlds/synthetic"
MODEL = loop_package("tiny_policy")


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    out = tmp_path_factory.mktemp("ground_truth")
    arguments = [str(WORLD), "--model", str(MODEL), "--prompt", "tiny", "--split", "train:1", "--out", str(out)]
    assert main(arguments) == 0
    return read_rollouts(out / "collections/ground-truth-train-1.jsonl")


def test_every_task_has_one_rollout_of_return_one(rollouts):
    assert [rollout.task_id for rollout in rollouts] == load_split(WORLD, "train:1")
    assert {rollout.reward for rollout in rollouts} == {1.0}


def test_the_sampled_tokens_are_the_solutions_turns_and_their_ends(rollouts):
    tokens = open_chat(MODEL)
    assert len(rollouts) >= 5
    for rollout in rollouts[:5]:
        solution = load_solution(WORLD, rollout.task_id)
        spoken = [tokens.decode(rollout.token_ids[turn.start : turn.end]) for turn in rollout.turns]
        assert spoken == [f"{turn.action}<|im_end|>" for turn in solution]
        opening = Prompt("tiny").messages(TaskCard.load(WORLD, rollout.task_id))
        assert rollout.token_ids[: rollout.turns[0].start] == tokens.prompt(opening)
        between = tokens.decode(rollout.token_ids[rollout.turns[0].end : rollout.turns[1].start])
        assert "Execution successful.\nAs a reminder" in between
        assert rollout.messages[-1]["content"] == solution[-1].action


def test_what_is_missing_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path), "--model", str(MODEL), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("loop method ground-truth: no AppWorld dataset at")
