"""The description of an environment in a run's folder."""

import pytest

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_formats.run_folder import ENVIRONMENT_FILE, read_description, write_description


def test_a_run_and_all_its_files_say_what_their_environment_is(tmp_path):
    written = Description(name="mine", numbered=True, environments={"a": Description(score="wins")})
    log = tmp_path / "node/collections/a.jsonl"
    log.parent.mkdir(parents=True)
    log.touch()
    assert read_description(tmp_path) == read_description(log) == DEFAULT_DESCRIPTION
    write_description(tmp_path, written)
    for path in (tmp_path, log, tmp_path / "metrics.jsonl"):
        assert read_description(path) == written


@pytest.mark.parametrize("text", ["{", "3"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / ENVIRONMENT_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"environment\.json is damaged: .*; remove it"):
        read_description(tmp_path)
