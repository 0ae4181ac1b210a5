"""Where the state of an episode is kept, and found again by the evaluation."""

import errno
import os
from types import SimpleNamespace

import pytest

from appworld_adapter.pool import run_folder
from appworld_adapter.pool.run_folder import STATE_LIMIT, WorldFolder, experiment_name, kept_state

EPISODE = f"eval-{'long' * 20}-0123456789/692c77d_1/0.0"


@pytest.fixture
def dataset(tmp_path):
    for name in ("api_docs", "base_dbs", "tasks"):
        (tmp_path / "dataset" / "data" / name).mkdir(parents=True)
    return tmp_path / "dataset"


def save(folder, episode_id, text, at):
    """What a world leaves of an episode."""
    task = folder.experiment(experiment_name(episode_id)) / "tasks" / episode_id.split("/")[1]
    task.mkdir(parents=True)
    (task / "state").write_text(text)
    os.utime(task, (at, at))


def test_the_last_state_of_an_episode_is_found_after_its_pool_has_gone(dataset, tmp_path_factory):
    worlds = tmp_path_factory.mktemp("w")
    first, second = (WorldFolder.create(str(worlds), dataset, keep=True) for _ in range(2))
    save(second, EPISODE, "second attempt", at=2000)
    save(first, EPISODE, "first attempt", at=1000)
    save(second, EPISODE.replace("/0.0", "/1.0"), "another run", at=3000)
    first.remove()
    second.remove()
    assert (kept_state(worlds, EPISODE, "692c77d_1") / "state").read_text() == "second attempt"
    assert kept_state(worlds, EPISODE, "692c77d_2") is None
    assert kept_state(worlds, EPISODE.replace("/0.0", "/2.0"), "692c77d_1") is None


def test_what_is_kept_are_states_and_logs_and_no_copy_of_the_dataset(dataset, tmp_path_factory):
    worlds = tmp_path_factory.mktemp("w")
    (dataset / "data" / "base_dbs" / "gmail.db").write_text("rows")
    folder = WorldFolder.create(str(worlds), dataset, keep=True)
    save(folder, EPISODE, "a state", at=1000)
    (folder.path / "world.log").write_text("a log")
    folder.remove()
    left = {path.name for path in folder.path.rglob("*") if not path.is_dir()}
    assert left == {"state", "world.log", "owner.lock", "keep"}
    assert [path.name for path in folder.path.iterdir() if path.is_dir()] == ["agent"]
    assert (dataset / "data" / "base_dbs" / "gmail.db").read_text() == "rows"


def test_two_attempts_at_one_episode_have_two_names_of_one_path_segment():
    names = {experiment_name(EPISODE) for _ in range(10)}
    assert len(names) == 10
    assert not any("/" in name for name in names)


def test_a_base_without_room_for_the_dataset_is_named_with_the_cure(dataset, tmp_path_factory, monkeypatch):
    worlds = tmp_path_factory.mktemp("w")
    (dataset / "data" / "base_dbs" / "gmail.db").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=2 << 20))
    with pytest.raises(OSError, match=r"has 2 MiB free.*databases take 3 MiB; set .*experiments_root to a folder"):
        WorldFolder.create(str(worlds), dataset, keep=False)
    assert not list(worlds.glob("*/run-*"))
    monkeypatch.undo()
    WorldFolder.create(str(worlds), dataset, keep=False).remove()


def test_a_base_without_room_for_the_largest_states_is_named_with_the_cure(
    dataset, tmp_path_factory, monkeypatch, caplog
):
    """As the 64 MB of a Docker container's tmpfs; honest episodes have room there, so the pool opens."""
    worlds = str(tmp_path_factory.mktemp("w"))
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * STATE_LIMIT))
    WorldFolder.create(worlds, dataset, False, 2).remove()
    assert not caplog.messages
    WorldFolder.create(worlds, dataset, False, 3).remove()
    (warning,) = caplog.messages
    assert "the largest states of 3 worlds 96 MiB" in warning
    for cure in ("experiments_root", "--shm-size", "max_worlds"):
        assert cure in warning


@pytest.mark.fault("on SMB, FUSE or 9p no checkpoint is written, because a call is refused that can be done without")
@pytest.mark.parametrize("call", ["fcntl.flock", "os.symlink"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_base_without_locks_or_links_is_named_with_the_cure(dataset, tmp_path_factory, monkeypatch, call, keep):
    def refuse(*_, **__):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    worlds = tmp_path_factory.mktemp("w")
    with monkeypatch.context() as patches:
        patches.setattr(call, refuse)
        with pytest.raises(OSError, match=r"^/.* has no locks or links: No locks .*; set the .*experiments_root to a"):
            WorldFolder.create(str(worlds), dataset, keep)
    WorldFolder.create(str(worlds), dataset, keep=False).remove()
    assert not list(worlds.glob("*/run-*/grader-*"))
