"""Scores on the way: of episodes, whatever number of sequences each has, and none where a task failed for good."""

from dataclasses import replace

import pytest

from agent_environments.description import Description
from loop_formats.collection_request import LostRollout
from loop_recipes.evaluation.dev_scores import dev_scores
from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.run.metrics import METRICS
from support.counter_node import counter_request
from support.fake_node import FixedNode, collected
from support.small_runs import in_sequences, stored_rollout


def test_what_counts_as_solved_is_the_environments_to_say():
    cut = replace(stored_rollout("c", "t_1", 0, 0, 1.0, 300, seed=1), end_reason="turn_limit")
    cut = replace(cut, messages=[{"role": "assistant", "content": "x"} for _ in cut.turns])
    lenient = Description(unfinished_solves=True)
    scores = [dev_scores(FixedNode(collected([cut])), counter_request(), each) for each in (Description(), lenient)]
    assert [score["dev_success"] for score in scores] == [0.0, 1.0]
    results = [TaskResult.from_rollout(cut, environment=each) for each in (Description(), lenient)]
    assert [TaskResult.from_dict(result.to_dict()).solved for result in results] == [False, True]


def test_an_episode_of_several_sequences_counts_once():
    solved = stored_rollout("c", "t_1", 0, 0, 1.0, 300, seed=1)
    unsolved = in_sequences(stored_rollout("c", "t_2", 0, 0, 0.5, 300, seed=2))
    assert len(unsolved) > 1
    assert dev_scores(FixedNode(collected([solved, *unsolved])), counter_request()) == {
        "dev_reward": 0.75,
        "dev_success": 0.5,
        "dev_tasks": 2,
        "dev_lost": 0,
    }


def test_with_several_rollouts_of_a_task_any_and_all_of_them_are_told():
    rewards = {"t_1": (1.0, 0.0), "t_2": (1.0, 1.0), "t_3": (0.0, 0.0)}
    rollouts = [
        stored_rollout("c", task, run, 0, reward, 300, seed=run)
        for task, both in rewards.items()
        for run, reward in enumerate(both)
    ]
    scores = dev_scores(FixedNode(collected(rollouts)), counter_request(rollouts_per_task=2))
    figures = (scores["dev_success"], scores["dev_pass_at_k"], scores["dev_pass_all_k"])
    assert figures == pytest.approx((1 / 2, 2 / 3, 1 / 3))
    assert scores["dev_pass_all_k_low"] < scores["dev_pass_all_k"] < scores["dev_pass_all_k_high"] <= 1
    assert {key for key in scores if key not in METRICS} == set()


def test_lost_rollouts_are_in_no_figure_but_their_own(caplog):
    solved = stored_rollout("c", "t_1", 0, 0, 1.0, 300, seed=1)
    source = FixedNode(collected([solved], [LostRollout("t_2", 0, "server_error", "boom")]))
    expected = {"dev_reward": 1.0, "dev_success": 1.0, "dev_tasks": 1, "dev_lost": 1}
    assert dev_scores(source, counter_request()) == expected
    assert "1 of 12 rollouts lost (server_error 1), such as rollout 0 of t_2: server_error: boom" in caplog.text
