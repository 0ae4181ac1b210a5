"""What the head of a run's page says of it: nothing that is not so."""

import contextlib
import json
import shutil

import pytest

from loop_formats.folder_lock import lock_folder
from loop_viewer.run_data import RunData
from loop_viewer.run_head import ListedCollection
from support.viewer_run import write_run

ENDED = {"end": {"reason": "finished"}}


def request(tasks, each, branches=()):
    return {"request": {"tasks": ["a"] * tasks, "rollouts_per_task": each, "branches": list(branches)}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("viewer") / "demo", iterations=2, tasks=1, per_task=2)


@pytest.fixture
def folder(written, tmp_path):
    """A run of four iterations that has done two, and is not at work."""
    folder = shutil.copytree(written, tmp_path / "demo")
    config = "model: {path: /models/Small-1B}\nmax_iterations: 4\nloss: {_component_: a.b.Clipped}\n"
    (folder / "config.yaml").write_text(config + "advantage: {_component_: a.LeaveOneOut}\n")
    return folder


def collection(folder, name, *told):
    log = folder / f"node/collections/{name}.jsonl"
    log.write_text((folder / "node/collections/demo-i0001.jsonl").read_text())
    log.with_suffix(".meta.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in told))


def head(folder):
    return RunData(folder).overview()["head"]


def test_a_head_says_model_and_algorithm(folder):
    assert head(folder) == {
        "model": "Small-1B",
        "algorithm": "LeaveOneOut, Clipped",
        "dataset": "synthetic-test",
        "state": "stopped after iteration 2 of 4",
        "runs": False,
        "seconds_left": None,
    }


def test_a_run_that_did_all_has_ended(folder):
    text = (folder / "config.yaml").read_text().replace("max_iterations: 4", "max_iterations: 2")
    (folder / "config.yaml").write_text(text)
    assert head(folder)["state"] == "ended"


@pytest.mark.parametrize(
    ("collections", "state"),
    [
        ({}, "iteration 3 of 4: begins"),
        ({"demo-i0003": [request(10, 3)]}, "iteration 3: collecting 2/30"),
        ({"demo-i0003": [request(10, 3), ENDED]}, "iteration 3 of 4: updating"),
        (
            {"demo-i0003-0123456789": [request(10, 3), ENDED], "demo-i0003-r1-0123456789": [request(2, 3)]},
            "iteration 3, round 2: collecting 2/6",
        ),
        ({"demo-i0002-dev-0123456789": [request(5, 1)]}, "dev tasks after iteration 2: collecting 2/5"),
        ({"demo-i0002-0123456789": [request(5, 1)]}, "iteration 3 of 4: begins"),
        ({"branch-demo-i0001-0123456789": [request(1, 1, ["x"])]}, "iteration 3 of 4: begins"),
    ],
    ids=["begins", "collecting", "updating", "a further round", "dev", "left behind", "a continuation"],
)
def test_a_run_at_work_says_what_it_does(folder, collections, state):
    for name, told in collections.items():
        collection(folder, name, *told)
    with lock_folder(folder, "run.lock", "run", "output_dir"):
        assert (head(folder)["state"], head(folder)["runs"]) == (state, True)


@pytest.mark.fault("the page called a run ended while it was being scored, or scored while it trained again")
@pytest.mark.parametrize(
    ("locked", "total", "told", "state"),
    [
        (["evaluation"], 2, {"eval-after-0123456789": [request(10, 4)]}, "after: scoring 2/40"),
        (["evaluation"], 2, {"eval-after-0123456789": [request(10, 4), ENDED]}, "scoring"),
        (["evaluation"], 2, {}, "scoring"),
        (["evaluation"], 4, {"demo-i0003": [request(10, 3)]}, "scoring"),
        ([""], 4, {"eval-after-0123456789": [request(10, 4)]}, "iteration 3 of 4: begins"),
        ([], 2, {"eval-after-0123456789": [request(10, 4)]}, "scoring stopped: after"),
        ([], 2, {"eval-after-0123456789": [request(10, 4), ENDED]}, "ended"),
    ],
)
def test_scoring_is_a_state_of_its_own(folder, locked, total, told, state):
    text = (folder / "config.yaml").read_text().replace("max_iterations: 4", f"max_iterations: {total}")
    (folder / "config.yaml").write_text(text)
    (folder / "evaluation").mkdir()
    for name, lines in told.items():
        collection(folder, name, *lines)
    with contextlib.ExitStack() as stack:
        for name in locked:
            stack.enter_context(lock_folder(folder / name, "run.lock", "run", "output_dir"))
        assert (head(folder)["state"], head(folder)["runs"]) == (state, bool(locked))
        assert head(folder)["seconds_left"] is None


def test_time_left_is_told_of_a_run_at_work_alone(folder):
    lines = [json.loads(line) | {"seconds": 90.0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert head(folder)["seconds_left"] is None
    with lock_folder(folder, "run.lock", "run", "output_dir"):
        assert head(folder)["seconds_left"] == 180.0


@pytest.mark.parametrize("config", ["", "- 1", "model: 3", "max_iterations: x\nloss: {_component_: [1]}", "{", "\x00"])
def test_a_config_of_any_kind_breaks_nothing(folder, config):
    (folder / "config.yaml").write_text(config)
    assert head(folder)["state"].startswith("stopped after iteration 2")


def test_an_evaluation_has_ended_with_its_report(folder):
    for file in ("config.yaml", "metrics.jsonl"):
        (folder / file).unlink()
    assert head(folder)["state"] == "not running"
    (folder / "report.json").write_text("{}")
    assert (head(folder)["state"], head(folder)["model"]) == ("ended", "model")


def test_what_a_collection_was_asked_for(tmp_path):
    log = tmp_path / "a.jsonl"
    assert ListedCollection.of(log) == ListedCollection(0, True, {})
    failure = {"failure": {"task_id": "t", "index": 0, "attempt": 0, "reason": "server_error"}}
    lines = [request(2, 3), {"opened": 1}, failure, failure]
    (tmp_path / "a.meta.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert ListedCollection.of(log) == ListedCollection(6, False, {"t": {"server_error": 2}})
