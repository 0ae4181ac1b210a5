"""Final states in the layout that `appworld evaluate` reads; the engine itself grades them in an integration test."""

import re
from hashlib import sha256

import pytest

from agent_environments.protocol import EnvironmentFault, FinishedRuns
from appworld_adapter.pool.experiments import split_name, write_experiments
from appworld_adapter.pool.forked import AppWorldPool


@pytest.fixture
def dataset(tmp_path):
    root = tmp_path / "world"
    for task in ("a_1", "a_2"):
        (root / f"data/tasks/{task}/dbs").mkdir(parents=True)
        (root / f"data/tasks/{task}/dbs/start.jsonl").write_text("start")
    (root / "data/datasets").mkdir()
    (root / "data/datasets/dev.txt").write_text("a_1\na_2\n")
    return root


def write(states, dataset, tmp_path):
    runs = FinishedRuns("before+1", "T=0 top_p=0.9", "dev", states)
    return write_experiments(runs, tmp_path / "kept", dataset, tmp_path / "out")


def test_a_state_that_does_not_count_is_the_start_of_its_task(dataset, tmp_path):
    states = {(task, run): None for run in range(2) for task in ("a_1", "a_2")}
    names = write(states, dataset, tmp_path)
    assert names == [f"before-1-{sha256(b'before+1').hexdigest()[:6]}-t0-top-p0-9-run{run}_dev" for run in range(2)]
    assert (tmp_path / "out/data/tasks").is_dir()
    for name in names:
        tasks = tmp_path / "out/experiments/outputs" / name / "tasks"
        assert sorted(path.name for path in tasks.iterdir()) == ["a_1", "a_2"]
        assert (tasks / "a_1/dbs/start.jsonl").read_text() == "start"


def test_a_state_that_was_not_kept_is_named(dataset, tmp_path):
    with pytest.raises(EnvironmentFault, match=r"the final state of c/a_1/0\.0 is not in"):
        write({("a_1", 0): "c/a_1/0.0"}, dataset, tmp_path)


@pytest.mark.fault("AppWorld's layout of chosen tasks")
@pytest.mark.parametrize("split", ["chosen", "train:1,2", "dev"])
def test_the_engine_finds_the_tasks_by_the_name_that_is_printed(dataset, tmp_path, split):
    """`appworld evaluate NAME SPLIT --root OUT` reads OUT/data/datasets/SPLIT.txt."""
    name = split_name(split)
    assert re.fullmatch("[a-z0-9_]+", name)
    for tasks in (["a_2", "a_1"], ["a_2"]):
        states = {(task, run): None for run in range(2) for task in tasks}
        out = tmp_path / "out"
        names = write_experiments(FinishedRuns("base", "T=0", split, states), tmp_path / "kept", dataset, out)
        assert [each.endswith(f"_{name}") for each in names] == [True, True]
        listed = (out / f"data/datasets/{name}.txt").read_text().split()
        assert listed == (["a_1", "a_2"] if split == "dev" else tasks)
        assert (out / "data/tasks/a_1/dbs/start.jsonl").read_text() == "start"
    assert sorted(path.name for path in (dataset / "data/datasets").iterdir()) == ["dev.txt"], "theirs is left alone"


def test_a_pool_writes_them_and_names_the_command_that_reads_them(dataset, tmp_path):
    out = tmp_path / "out"
    runs = FinishedRuns("base", "T=0", "chosen", {("a_1", 0): None, ("a_2", 0): None})
    lines = AppWorldPool.write_states({"root": str(dataset)}, runs, tmp_path / "kept", out)
    assert lines == [f"appworld evaluate base-t0-run0_chosen chosen --root {out}"]
    assert (out / "experiments/outputs/base-t0-run0_chosen/tasks/a_1/dbs/start.jsonl").read_text() == "start"


@pytest.mark.fault("the same file, model, adapter or run in another place is taken for another")
def test_policies_of_other_names_have_other_experiments(dataset, tmp_path):
    policies = ["v1.0", "v1-0", "v1_0", "V1-0", "v1--0", "v1+0"]
    runs = [FinishedRuns(policy, "T=0", "dev", {("a_1", 0): None}) for policy in policies]
    names = {name for each in runs for name in write_experiments(each, tmp_path, dataset, tmp_path / "out")}
    assert len(names) == len(policies)
    assert "v1-0-t0-run0_dev" in names
    assert all(re.fullmatch("[a-z0-9_-]+", name) for name in names)
