"""What is handed over of a collection, and which rollouts an update refuses."""

import json
from dataclasses import replace

import pytest

from loop_formats.collection_request import CollectionEnd, LostRollout
from loop_recipes.evaluation.dev_scores import dev_scores
from loop_recipes.rollouts.shared_source import SharedSource
from loop_recipes.rollouts.source import Collected, NoRollouts, check_versions, collect, in_groups
from loop_recipes.run.stop_request import StopRequested
from rollout_server.client import CollectionFailed
from support.counter_node import counter_request
from support.fake_node import FixedNode
from support.rollouts import rollout, turn

END = CollectionEnd(
    "early_stop", 6, 2, 90, {"server_error": 1, "bad_logprob": 2}, 5.0, failures_by_task={"t_1": 1, "t_2": 2}
)


def sampled_by(version):
    words = {"messages": [{"role": "assistant", "content": "x"}], "extra": {"who": "me"}}
    words |= {"requirements": [{"text": "it is done", "passed": False}], "reward": 1 / 3}
    return rollout([5, 6, 7], [turn(1, 3, version)], sampler_logprobs=[0.0, -0.1, -1e-17], **words).validate()


def test_other_ranks_get_all_but_the_texts():
    rollout = sampled_by(3)
    collected = Collected([rollout], END, 1.5)
    received = Collected.unpack(json.loads(json.dumps(collected.pack())))
    assert received == replace(collected, rollouts=[replace(rollout, messages=[], requirements=[])])
    assert rollout.messages, "rank 0 keeps the texts"


def test_metrics_of_a_collection():
    lost = [LostRollout(task, 1, "server_error", "boom") for task in ("t_1", "t_2", "t_2")]
    pair = [replace(sampled_by(3), task_id="t_3", index=index, rollout_id=f"c/t_3/{index}.0") for index in range(2)]
    assert Collected([sampled_by(3), *pair], replace(END, lost=lost), 1.5).metrics() == {
        "lost_rollouts": 3,
        "tasks_left_out": 2,
        "dropped_rollouts": 2,
        "all_rollouts": 8,
        "all_sampled_tokens": 96,
        "failed_attempts": 3,
        "failed_attempts_worst_task": 2,
        "ungradable_rollouts": 0,
        "broken_rollouts": 0,
        "seconds_collecting": 5.0,
        "seconds_waiting": 1.5,
    }


def test_tasks_with_one_rollout_are_left_out():
    pair = [replace(sampled_by(3), task_id="t_3", index=index, rollout_id=f"c/t_3/{index}.0") for index in range(2)]
    assert in_groups([sampled_by(3), *pair]) == pair
    with pytest.raises(NoRollouts, match="none of 1 tasks has 2 rollouts to compare"):
        in_groups([sampled_by(3)])


def test_too_many_losses_are_said_with_their_cure_and_a_few_are_a_warning(caplog):
    lost = [LostRollout("t_1", index, "server_error", "boom") for index in range(2)]

    def losing(request, deadline_s):
        if len(lost) > request.max_lost:
            raise CollectionFailed("collection c1 failed: 2 of 12 rollouts lost", replace(END, lost=lost))
        return Collected([], replace(END, lost=lost), 0.0)

    collect(FixedNode(losing), counter_request(max_lost=2))
    assert (
        "c1 goes on with what it has: 2 of 12 rollouts lost (server_error 2), such as rollout 1 of t_1" in caplog.text
    )
    with pytest.raises(
        CollectionFailed, match=r"2 of 12 rollouts lost; mend what .* or raise collection.max_lost_share"
    ):
        collect(FixedNode(losing), counter_request(max_lost=1))


def test_a_stop_while_waiting_gives_nothing():
    source, request = FixedNode(StopRequested()), counter_request()
    shared = SharedSource(lambda: source)
    assert shared.collect(request) is shared.ask(lambda node: dev_scores(node, request)) is None
    assert source.asked == [request, request]


def test_versions_outside_the_lag_are_refused():
    rollouts = [sampled_by(4), sampled_by(3)]
    check_versions(rollouts, 3, 4)
    with pytest.raises(NoRollouts, match=r"policy versions \[3\]; the update takes 4 to 4"):
        check_versions(rollouts, 4, 4)
