"""The home of an episode's program: its own, and gone with the episode."""

import os
import sys

import pytest

from agent_environments.harness.home import XDG, home_variables, make_home, remove_home
from agent_environments.harness.pool import HarnessPool
from agent_environments.harness.program import program_environment
from agent_environments.program_protocol import Connection

CONNECTION = Connection("http://127.0.0.1:1/v1", "sk-1", "c1.t_1.0", "c1", 0, 8)
OWN = ("HOME", "TMPDIR", "TMP", "TEMP", *XDG)


def there(paths):
    return [path for path in paths if os.path.exists(path)]


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def pool(**options):
    commands = {"command": ["true"], "grade_command": ["true"]}
    return HarnessPool(lambda text: [], **{"tasks": {"train": ["t_1"]}, **commands, **options})


@pytest.mark.fault("a program plays with its neighbour's key")
async def test_each_episode_has_folders_of_its_own_and_leaves_none(monkeypatch):
    for name in OWN:
        monkeypatch.setenv(name, "/node/shared")
    harnesses = pool()
    environments = [await harnesses.acquire(str(number)) for number in range(3)]
    seen = []
    for environment in environments:
        await environment.start("t_1")
        seen.append(program_environment(environment._variables(CONNECTION, {})))
    folders = [variables[name] for variables in seen for name in ("TMPDIR", "EPISODE_FOLDER", *XDG)]
    assert len(set(folders)) == len(folders)
    assert there(folders) == folders
    assert not any("/node/shared" in variables.get(name, "") for variables in seen for name in OWN)
    for variables in seen:
        assert os.listdir(variables["EPISODE_FOLDER"]) == []
        assert all(variables[name].startswith(variables["HOME"] + "/") for name in XDG)
        assert len(variables["TMPDIR"]) < 40, "a Unix socket's path in it must fit"
    for environment in environments:
        await environment.close()
    assert there(folders) == []


@pytest.mark.fault("a program plays with its neighbour's key")
async def test_a_program_finds_what_it_wrote_into_its_home_and_no_other_does():
    code = "import os, pathlib; key = pathlib.Path.home() / 'key'; print(key.exists()); key.write_text('k')"
    harnesses = pool(command=[sys.executable, "-c", code])
    for number in range(2):
        environment = await harnesses.acquire(str(number))
        await environment.start("t_1")
        ended = await environment.run(CONNECTION)
        assert (ended.status, ended.output) == (0, "False\n")
        assert (environment._own / "home" / "key").exists()
        await environment.close()


async def test_a_home_is_filled_from_a_template(tmp_path, monkeypatch):
    (tmp_path / "agent/.codex").mkdir(parents=True)
    (tmp_path / "agent/.codex/config.toml").write_text("model = 'policy'")
    monkeypatch.chdir(tmp_path)
    harnesses = pool(home_template="agent", variables={"XDG_CACHE_HOME": "/cache"})
    await harnesses.open()
    environment = await harnesses.acquire("e")
    await environment.start("t_1")
    variables = environment._variables(CONNECTION, {})
    config = os.path.join(variables["HOME"], ".codex/config.toml")
    append(config, "# mine")
    assert variables["XDG_CACHE_HOME"] == "/cache", "what the config says it has"
    await environment.close()
    assert there([config]) == []
    assert (tmp_path / "agent/.codex/config.toml").read_text() == "model = 'policy'"


async def test_a_template_that_is_not_there_is_named_before_any_episode():
    with pytest.raises(FileNotFoundError, match="home_template: there is no folder /nowhere"):
        await pool(home_template="/nowhere").open()


def test_read_only_folders_go_and_what_links_point_to_stays(tmp_path):
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    outside.chmod(0o500)
    folder = tmp_path / "own"
    folder.mkdir()
    make_home(folder, None)
    cache = folder / "home/go/pkg"
    cache.mkdir(parents=True)
    (cache / "file").write_text("x")
    (folder / "home/link").symlink_to(outside)
    cache.chmod(0o500)
    cache.parent.chmod(0o500)
    remove_home(folder)
    assert not folder.exists()
    assert outside.stat().st_mode & 0o777 == 0o500
    assert (outside / "kept").exists()
    outside.chmod(0o700)


def test_programs_that_a_user_has_installed_are_still_found(tmp_path, monkeypatch):
    (tmp_path / ".local/lib").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYTHONUSERBASE", raising=False)
    found = home_variables(tmp_path / "own")
    assert found["PYTHONUSERBASE"] == str(tmp_path / ".local")
    assert "RUSTUP_HOME" not in found
    monkeypatch.delenv("HOME")
    assert "PYTHONUSERBASE" not in home_variables(tmp_path / "own")
