"""Fetching the real data, against a stand-in for the engine's command that lies in the ways the real one does."""

from pathlib import Path

import pytest

from appworld_adapter.worker.fetch_data import VERIFIED_MARK, FetchError, fetch
from support.texts import texts_beside

TABLES = texts_beside(__file__)


def engine(folder: Path, verdict: str = "Passed 5/5 tasks.", downloads: bool = True, lost: str = "no") -> Path:
    """An ``appworld`` that exits with 0 whatever happens; its data has 3 train and 2 dev tasks."""
    path = folder / "appworld"
    fails = "" if downloads else 'echo "Failed to download file. Status code: 403"; exit 0'
    script = texts_beside(__file__)["appworld"].replace("DOWNLOADS", fails)
    path.write_text(script.replace("LOST", lost).replace("VERDICT", verdict))
    path.chmod(0o755)
    return path


def test_verified_data_takes_the_place_of_what_was_there(tmp_path):
    root = tmp_path / "worlds" / "appworld"
    (root / "data").mkdir(parents=True)
    (root / "data" / "old").touch()
    assert fetch(engine(tmp_path), root).startswith("Passed 5/5 tasks. Tasks: {'train': 3, 'dev': 2,")
    assert sorted(path.name for path in root.iterdir()) == ["data", VERIFIED_MARK]
    assert not (root / "data" / "old").exists()
    assert [path.name for path in root.parent.iterdir()] == ["appworld"]


@pytest.mark.parametrize(("options", "message"), TABLES["whatever_is_not_verified_leaves_everything_as_it_was"])
def test_whatever_is_not_verified_leaves_everything_as_it_was(tmp_path, options, message):
    root = tmp_path / "worlds" / "appworld"
    (root / "data").mkdir(parents=True)
    (root / "data" / "old").touch()
    with pytest.raises(FetchError, match=message):
        fetch(engine(tmp_path, **options), root)
    assert [path.name for path in root.parent.iterdir()] == ["appworld"]
    assert (root / "data" / "old").exists()


@pytest.mark.parametrize("content", ["notes.txt", "appworld/data/old"])
def test_a_folder_of_something_else_is_left_alone(tmp_path, content):
    root = tmp_path / "worlds"
    (root / content).parent.mkdir(parents=True)
    (root / content).touch()
    with pytest.raises(FetchError, match="holds something other than AppWorld's data; give another folder"):
        fetch(engine(tmp_path), root)
    assert (root / content).exists()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match="cannot be created: Not a directory; give another folder"):
        fetch(engine(tmp_path), tmp_path / "file" / "root" / "appworld")


def test_no_engine_is_one_clear_error(tmp_path):
    with pytest.raises(FetchError, match="No such file"):
        fetch(tmp_path / "appworld", tmp_path / "root")
