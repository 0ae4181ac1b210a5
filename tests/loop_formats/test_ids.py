import pytest

from loop_formats.ids import (
    CollectionName,
    branch_id,
    dev_id,
    evaluation_id,
    group_id,
    parse_collection_id,
    replay_id,
    rollout_id,
    search_id,
    share_id,
    task_of,
    training_id,
)

PROTOCOL = '["a protocol"]'


@pytest.mark.parametrize(
    ("collection_id", "written", "name"),
    [
        (training_id("demo-3f", 7, PROTOCOL), "demo-3f-i0007-38d16ba024", CollectionName("demo-3f", 7)),
        (training_id("demo", 12345, PROTOCOL), "demo-i12345-38d16ba024", CollectionName("demo", 12345)),
        (training_id("demo", 7, PROTOCOL, 2), "demo-i0007-r2-38d16ba024", CollectionName("demo", 7, 2)),
        (
            share_id(training_id("demo", 7, PROTOCOL, 12), 2, 2),
            "demo-i0007-r12-38d16ba024-2of2",
            CollectionName("demo", 7, 12, share="2of2"),
        ),
        (
            dev_id("a-i0001-dev", 0, PROTOCOL),
            "a-i0001-dev-i0000-dev-38d16ba024",
            CollectionName("a-i0001-dev", 0, dev=True),
        ),
        (
            share_id(training_id("demo", 7, PROTOCOL), 1, 2),
            "demo-i0007-38d16ba024-1of2",
            CollectionName("demo", 7, share="1of2"),
        ),
        (
            share_id(dev_id("demo", 7, PROTOCOL), 2, 16),
            "demo-i0007-dev-38d16ba024-2of16",
            CollectionName("demo", 7, dev=True, share="2of16"),
        ),
        (
            evaluation_id("v7+T1", PROTOCOL),
            "eval-v7-T1-38d16ba024",
            CollectionName("v7-T1", score="eval-v7-T1-38d16ba024", policy="v7-T1"),
        ),
        (
            share_id(evaluation_id("v7", PROTOCOL), 1, 2),
            "eval-v7-38d16ba024-1of2",
            CollectionName("v7", score="eval-v7-38d16ba024", policy="v7"),
        ),
        (
            replay_id(evaluation_id("v7-t1-t0.5", PROTOCOL), "692c77d_1"),
            "eval-v7-t1-t0.5-38d16ba024-f6698e50",
            CollectionName("v7-t1-t0.5", score="eval-v7-t1-t0.5-38d16ba024", policy="v7-t1", temperature="0.5"),
        ),
        (group_id("demo", 7, PROTOCOL, 123), "demo-i0007-g123-38d16ba024", CollectionName("demo", 7, group=123)),
        (branch_id("demo-i0007", PROTOCOL), "branch-demo-i0007-38d16ba024", CollectionName("demo-i0007", branch=True)),
        (search_id("rft-3f", 0.35, 3), "rft-3f-t0.35-a003", CollectionName("rft-3f-t0.35-a003")),
        ("counter", "counter", CollectionName("counter")),
    ],
)
def test_what_is_written_into_a_collections_id_is_read_from_it(collection_id, written, name):
    assert (collection_id, parse_collection_id(collection_id)) == (written, name)
    assert name.is_training == (name.iteration is not None and not name.dev)
    assert name.is_score == (name.dev or bool(name.policy))


def test_a_task_asked_for_alone_has_an_id_of_its_own():
    evaluation = evaluation_id("v7", PROTOCOL)
    alone = replay_id(evaluation, "692c77d_1")
    assert alone.startswith(f"{evaluation}-")
    assert alone != replay_id(evaluation, "692c77d_2")


def test_another_protocol_is_another_evaluation():
    assert evaluation_id("v7", PROTOCOL) != evaluation_id("v7", PROTOCOL + " ")


def test_a_rollouts_id_names_collection_task_index_and_attempt():
    assert rollout_id("demo-i0007", "692c77d_1", 3, 0) == "demo-i0007/692c77d_1/3.0"


@pytest.mark.parametrize(("known", "task"), [("c-i0001/a/b/3.0", "c-i0001/a/b"), ("my-agent", "")])
def test_the_rollouts_of_a_task_share_the_beginning_of_their_ids(known, task):
    assert task_of(known) == task
