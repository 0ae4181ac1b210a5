"""Stored logs as a source: in order, checked line by line."""

import json

import pytest

from loop_recipes.collecting.replay_source import ReplaySource
from loop_recipes.collecting.source import NoRollouts
from loop_recipes.config.schema import ConfigError
from support.counter_node import counter_request

RECORD = {
    "rollout_id": "c/t_1/0.0",
    "collection_id": "c",
    "task_id": "t_1",
    "index": 0,
    "attempt": 0,
    "seed": 1,
    "dataset": "made-up",
    "token_ids": [5, 6, 7],
    "mask": [False, True, True],
    "sampler_logprobs": [0.0, -0.5, -0.25],
    "turns": [
        {
            "start": 1,
            "end": 3,
            "policy_version": 0,
            "finish_reason": "stop",
            "server": "s0",
            "sampling_seconds": 0.1,
            "environment_seconds": 0.1,
        }
    ],
    "messages": [],
    "reward": 0.5,
    "success": False,
    "requirements": [],
    "end_reason": "completed",
    "temperature": 1.0,
    "started_at": 0.0,
    "seconds": 1.0,
    "schema": 1,
}
TEXT = {"token_ids": [], "mask": [], "sampler_logprobs": [], "turns": [RECORD["turns"][0] | {"start": 0, "end": 0}]}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_each_iteration_reads_its_own_log(tmp_path):
    for number in (1, 2):
        write(tmp_path / f"run-i000{number}.jsonl", RECORD | {"task_id": f"t_{number}"})
        write(tmp_path / f"run-i000{number}.meta.jsonl", {"request": {}})
        write(tmp_path / f"run-i000{number}-dev.jsonl", RECORD | {"task_id": "dev_1"})
    source = ReplaySource(tmp_path)
    assert source.tasks("train") == ("made-up", ["t_1", "t_2"])
    collected = source.read(counter_request("other-i0002"))
    assert [rollout.task_id for rollout in collected.rollouts] == ["t_2"]
    assert (collected.end.reason, collected.end.finished) == ("complete", 1)
    with pytest.raises(NoRollouts, match="iteration 3 was asked for, but only 2 logs"):
        source.read(counter_request("other-i0003"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "run-i0001.jsonl:2: rollout schema 2 is not 1"),
        ({"reward": 7.0}, "run-i0001.jsonl:2: .*reward 7.0 outside"),
        (TEXT, "c/t_1/0.0 has no token ids: an endpoint's rollouts cannot be trained on"),
    ],
)
def test_what_cannot_be_trained_on_is_named(tmp_path, changes, message):
    write(tmp_path / "run-i0001.jsonl", RECORD, RECORD | changes)
    with pytest.raises(ConfigError, match=f"rollout_node.replay: .*{message}"):
        ReplaySource(tmp_path).read(counter_request("other-i0001"))
