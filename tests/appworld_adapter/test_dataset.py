import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments.protocol import UnknownTask
from appworld_adapter.dataset import (
    PAPER_TRAIN_SCENARIOS,
    TaskSampler,
    dataset_name,
    difficulty_of,
    load_split,
    scenario_of,
)


@pytest.fixture
def root(tmp_path):
    train = ["bbb_1", "bbb_2", "aaa_1", f"{PAPER_TRAIN_SCENARIOS[0]}_1"]
    (tmp_path / "data" / "datasets").mkdir(parents=True)
    (tmp_path / "data" / "datasets" / "train.txt").write_text("\n".join(train) + "\n\n")
    (tmp_path / "data" / "datasets" / "dev.txt").write_text("ccc_1:tagged\n")
    for number, task in enumerate([*train, "ccc_1"]):
        truth = tmp_path / "data" / "tasks" / task / "ground_truth"
        truth.mkdir(parents=True)
        (truth.parent / "specs.json").write_text("{}")
        (truth / "metadata.json").write_text(json.dumps({"difficulty": 1 + number % 3}))
    return tmp_path


def test_splits_in_the_order_of_the_dataset(root):
    assert load_split(root, "train")[:3] == ["bbb_1", "bbb_2", "aaa_1"]
    assert load_split(root, "dev") == ["ccc_1"]
    assert load_split(root, ["ccc_1", "aaa_1"]) == ["ccc_1", "aaa_1"]
    assert load_split(root, "paper_train") == [f"{PAPER_TRAIN_SCENARIOS[0]}_1"]


def test_by_difficulty(root):
    assert [difficulty_of(root, task) for task in load_split(root, "train")] == [1, 2, 3, 1]
    assert load_split(root, "train:1,2") == ["bbb_1", "bbb_2", f"{PAPER_TRAIN_SCENARIOS[0]}_1"]
    assert load_split(root, "train:3") == ["aaa_1"]
    for split in ("train:", "train:4", "train:1, 2"):
        with pytest.raises(UnknownTask, match="must end in difficulties 1 to 3, such as train:1,2"):
            load_split(root, split)
    (root / "data/tasks/ccc_1/ground_truth/metadata.json").unlink()
    with pytest.raises(UnknownTask, match="split 'dev:1': dataset appworld lacks difficulties"):
        load_split(root, "dev:1")


def test_the_paper_trains_on_24_scenarios():
    assert len(set(PAPER_TRAIN_SCENARIOS)) == 24


@pytest.mark.parametrize("split", ["trane", "../datasets/train", ""])
def test_unknown_split_names_those_there_are(root, split):
    with pytest.raises(UnknownTask, match="there are dev, train"):
        load_split(root, split)


@pytest.mark.parametrize("task", ["zzz_1", "../tasks/aaa_1", "aaa", "aaa_", "_1", "aaa_x", ""])
def test_unknown_task_is_named(root, task):
    with pytest.raises(UnknownTask, match="task"):
        load_split(root, [task])


def test_missing_dataset_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="make world"):
        dataset_name(tmp_path)


def test_dataset_name(root):
    assert dataset_name(root) == "appworld"
    (root / "dataset.json").write_text('{"name": "synthetic-v1-seed0"}')
    assert dataset_name(root) == "synthetic-v1-seed0"


def test_scenario():
    assert scenario_of("07b42fd_2") == "07b42fd"


task_sets = st.sets(st.integers(0, 40), min_size=1, max_size=20).map(lambda ids: [f"s{number}_1" for number in ids])


@settings(deadline=None)  # a busy machine is no failure
@given(task_sets, st.data())
def test_sampler_visits_everything_once_per_pass(tasks, data):
    size = data.draw(st.integers(1, len(tasks)))
    sampler = TaskSampler(tasks, size, seed=3)
    drawn = []
    for _ in range(30):
        iteration = sampler.next()
        assert len(iteration) == size == len(set(iteration))
        drawn += iteration
    for start in range(0, len(drawn) - len(tasks) + 1, len(tasks)):
        assert sorted(drawn[start : start + len(tasks)]) == sorted(tasks)


@settings(deadline=None)  # a busy machine is no failure
@given(task_sets, st.integers(0, 15), st.integers(0, 5))
def test_sampler_resumes_and_ignores_the_order_of_its_tasks(tasks, before, seed):
    size = max(1, len(tasks) // 3)
    one = TaskSampler(tasks, size, seed)
    for _ in range(before):
        one.next()
    state = json.loads(json.dumps(one.state_dict()))
    other = TaskSampler(tasks[::-1], size, seed)
    other.load_state_dict(state)
    assert [one.next() for _ in range(10)] == [other.next() for _ in range(10)]


def test_sampler_visits_every_scenario_before_any_twice():
    tasks = [f"s{scenario}_{number}" for scenario in range(7) for number in (1, 2, 3)]
    sampler = TaskSampler(tasks, 7, seed=0)
    iterations = [sampler.next() for _ in range(6)]
    for iteration in iterations:
        assert sorted(task[:2] for task in iteration) == [f"s{scenario}" for scenario in range(7)]
    assert iterations[0] != iterations[3], "another pass, another order"
    assert len(set(TaskSampler(["one", "two", "three"], 3, seed=0).next())) == 3, "ids without a scenario"


def test_sampler_refuses_foreign_states():
    sampler = TaskSampler(["a_1", "b_1"], 1, seed=0)
    with pytest.raises(ValueError, match="of other tasks"):
        sampler.load_state_dict(TaskSampler(["a_1"], 1, seed=0).state_dict())
    with pytest.raises(ValueError, match="of seed 1"):
        sampler.load_state_dict(TaskSampler(["a_1", "b_1"], 1, seed=1).state_dict())


@pytest.mark.parametrize("size", [0, 3])
def test_sampler_needs_enough_tasks(size):
    with pytest.raises(ValueError, match="between 1 and the number of tasks, 2"):
        TaskSampler(["a_1", "b_1"], size, seed=0)
