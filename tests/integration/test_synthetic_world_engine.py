"""The synthetic world that `make world` leaves; and as drills: one generated twice, verified by the engine, and played
by scripted agents. That nothing drawn depends on the hash seed is shown by test_synthetic_world.py without the engine.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from appworld_adapter.worker.synthetic import generate
from support import adapter_support
from support.adapter_support import REPOSITORY, ROOT, needs_world
from support.waiting import COMMAND_S

PYTHON = Path(adapter_support.PYTHON)
SYNTHETIC = REPOSITORY / "appworld_adapter" / "worker" / "synthetic"
PARAMETERS = ["--seed", "5", "--scenarios-per-template", "1", "--people", "48"]

pytestmark = [pytest.mark.integration, needs_world]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """The same parameters generated at once in two processes with different hash seeds."""
    folder = tmp_path_factory.mktemp("synthetic")
    roots = [folder / "first", folder / "second"]
    children = [
        subprocess.Popen(
            [PYTHON, SYNTHETIC / "generate.py", "--root", root, *PARAMETERS],
            env=os.environ | {"PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, root in enumerate(roots, start=1)
    ]
    try:
        messages = [child.communicate(timeout=COMMAND_S)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, message in zip(children, messages, strict=True):
        assert child.returncode == 0, message
        assert "nothing" in message
    return roots


def files_under(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.drill
def test_same_seed_gives_the_same_bytes(worlds):
    first, second = (files_under(root) for root in worlds)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize("of", ["make world", pytest.param("another seed", marks=pytest.mark.drill)])
def test_layout_and_counts(of, request):
    root = ROOT if of == "make world" else request.getfixturevalue("worlds")[0]
    assert sorted(entry.name for entry in root.iterdir()) == ["data", "dataset.json"]
    dataset = json.loads((root / "dataset.json").read_text())
    drawn = "seed{seed}-{scenarios_per_template}x{people}".format(**dataset)
    assert dataset["name"] == f"synthetic-{generate.GENERATOR_VERSION}-{drawn}"
    apps, templates = {}, set()
    for split, count in dataset["tasks"].items():
        ids = (root / "data" / "datasets" / f"{split}.txt").read_text().split()
        assert len(ids) == count == 3 * len({task_id.split("_")[0] for task_id in ids}) > 0
        apps[split] = set()
        for task_id in ids:
            truth = root / "data" / "tasks" / task_id / "ground_truth"
            demonstration = json.loads((truth / "demonstration.json").read_text())
            requirements = json.loads((truth / "test_data.json").read_text())
            turns = json.loads((truth / "turns.json").read_text())
            assert len(requirements) >= 3
            assert len({requirement["requirement"] for requirement in requirements}) == len(requirements)
            assert len(turns) == len(demonstration["roles"])
            assert demonstration["difficulty"] in (1, 2, 3)
            apps[split] |= set(demonstration["apps"])
            templates.add(demonstration["template"])
    assert len(templates) >= 12
    assert len(apps["train"]) >= 4
    assert apps["test_challenge"] - apps["train"] == {"todoist"}


def test_nothing_is_done_when_the_dataset_is_there(tmp_path):
    described = json.dumps(generate.describe(5, 1, 48))
    (tmp_path / "dataset.json").write_text(described)
    command = [PYTHON, SYNTHETIC / "generate.py", "--root", tmp_path, *PARAMETERS]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    assert "is there already" in finished.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.json"]
    assert (tmp_path / "dataset.json").read_text() == described


@pytest.mark.drill
def test_engine_verifies_all_train_and_dev_tasks(worlds):
    dataset = json.loads((worlds[1] / "dataset.json").read_text())
    count = dataset["tasks"]["train"] + dataset["tasks"]["dev"]
    command = [PYTHON.with_name("appworld"), "verify", "tasks", "--root", worlds[1]]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    assert f"Passed {count}/{count} tasks." in finished.stdout, finished.stdout[-2000:] + finished.stderr[-2000:]


@pytest.mark.drill
def test_doing_nothing_is_no_success_in_the_default_world():
    """Which generate.py does not check on each machine."""
    command = [PYTHON, SYNTHETIC / "check.py", "--root", ROOT, "--agent", "nothing", "--every", "3"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.drill
def test_scripted_agents_are_paid_what_they_deserve(worlds):
    """The reference turns solve the tests' tasks; doing nothing or only completing never does, nor pays more."""
    command = [PYTHON, SYNTHETIC / "check.py", "--root", worlds[0], "--every", "3"]
    finished = subprocess.run(
        [*command, "--split", "test_normal", "test_challenge"], capture_output=True, text=True, timeout=COMMAND_S
    )
    assert finished.returncode == 0, finished.stderr
    rewards = {tuple(line.split()[:2]): float(line.split()[3]) for line in finished.stdout.splitlines()[1:]}
    for split in ("test_normal", "test_challenge"):
        assert rewards[split, "reference"] == 1
        assert rewards[split, "complete"] == rewards[split, "nothing"] < 0.5
