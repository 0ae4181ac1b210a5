import json
import re
from pathlib import Path

import pytest

from agent_environments.protocol import UnknownTask
from appworld_adapter import making
from appworld_adapter.dataset import (
    PAPER_TRAIN_SCENARIOS,
    UNNAMED_DATASET,
    dataset_name,
    difficulty_of,
    load_split,
    scenario_of,
)

CHECKOUT = Path(__file__).parents[2]


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
    with pytest.raises(UnknownTask, match=r"split 'dev:1': dataset unknown .* lacks difficulties"):
        load_split(root, "dev:1")


def test_the_paper_trains_on_24_scenarios():
    assert len(set(PAPER_TRAIN_SCENARIOS)) == 24


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        *((split, "there are dev, train") for split in ("trane", "../datasets/train", "")),
        *(([task], "task") for task in ("zzz_1", "../tasks/aaa_1", "aaa", "aaa_", "_1", "aaa_x", "")),
        ("empty", r"split 'empty' .* holds no tasks"),
        ("dev:1", r"split 'dev:1' .* holds no tasks"),
    ],
)
def test_what_holds_no_tasks_is_named(root, chosen, said):
    if chosen == "empty":
        (root / "data/datasets/empty.txt").write_text("\n\n")
    with pytest.raises(UnknownTask, match=said):
        load_split(root, chosen)


def test_missing_dataset_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="make world"):
        dataset_name(tmp_path)


def test_dataset_name(root):
    assert dataset_name(root) == UNNAMED_DATASET
    for scenario in PAPER_TRAIN_SCENARIOS:
        (root / "data" / "tasks" / f"{scenario}_1").mkdir(exist_ok=True)
    assert dataset_name(root) == "appworld", "known by its training scenarios"
    (root / "dataset.json").write_text('{"name": "synthetic-v1-seed0"}')
    assert dataset_name(root) == "synthetic-v1-seed0"
    (root / "dataset.json").write_text("[]")
    with pytest.raises(ValueError, match=r"dataset\.json must be"):
        dataset_name(root)


def test_scenario():
    assert scenario_of("07b42fd_2") == "07b42fd"


def test_a_wheel_has_no_makefile_and_names_whole_commands(monkeypatch):
    assert making.interpreter_command("/w/.venv-appworld/bin/python") == "`make setup`"
    monkeypatch.setattr(making, "_IN_CHECKOUT", False)
    line = making.interpreter_command("/w/.venv-appworld/bin/python")
    assert f"-m venv /w/.venv-appworld && /w/.venv-appworld/bin/pip install {making.APPWORLD} && " in line
    assert "/w/.venv-appworld/bin/appworld install`" in line
    assert making.APPWORLD in (CHECKOUT / "requirements/appworld.in").read_text().splitlines()
    named = re.findall(r"(\S+\.py) --root /w/worlds", making.dataset_commands("/w/worlds"))
    assert [Path(file).is_file() for file in named] == [True, True]
