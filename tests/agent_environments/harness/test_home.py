"""The home of an episode's program: its own, and gone with the episode."""

import os
import sys

import pytest

from agent_environments.harness.home import XDG
from agent_environments.harness.pool import HarnessPool
from agent_environments.harness.program import program_environment
from agent_environments.program_protocol import Connection
from support.episodes import begun_episode
from support.texts import texts_beside

TABLES = texts_beside(__file__)

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
    for _ in range(2):
        async with begun_episode(harnesses, "t_1") as environment:
            ended = await environment.run(CONNECTION)
            assert (ended.status, ended.output) == (0, "False\n")
            assert (environment._own / "home" / "key").exists()


async def test_a_home_is_filled_from_a_template(tmp_path, monkeypatch):
    (tmp_path / "agent/.codex").mkdir(parents=True)
    (tmp_path / "agent/.codex/config.toml").write_text("model = 'policy'")
    monkeypatch.chdir(tmp_path)
    harnesses = pool(home_template="agent", variables={"XDG_CACHE_HOME": "/cache"})
    await harnesses.open()
    async with begun_episode(harnesses, "t_1") as environment:
        variables = environment._variables(CONNECTION, {})
        config = os.path.join(variables["HOME"], ".codex/config.toml")
        append(config, "# mine")
        assert variables["XDG_CACHE_HOME"] == "/cache", "what the config says it has"
    assert there([config]) == []
    assert (tmp_path / "agent/.codex/config.toml").read_text() == "model = 'policy'"


async def test_a_template_that_is_not_there_is_named_before_any_episode():
    with pytest.raises(FileNotFoundError, match="home_template: there is no folder /nowhere"):
        await pool(home_template="/nowhere").open()


async def ran(harnesses, *programs):
    """What each of these programs prints, in an episode of its own."""
    printed = []
    for program in programs:
        harnesses.starter.command = [sys.executable, "-c", program]
        environment = await harnesses.acquire("e")
        await environment.start("t_1")
        printed.append((await environment.run(CONNECTION)).output)
        grade = await environment.grade()
        await environment.close()
    return printed, grade


@pytest.mark.attack
@pytest.mark.fault("what an agent installs is imported by the next episode and by the grader")
async def test_what_an_agent_installs_goes_with_its_episode(tmp_path, monkeypatch):
    base = tmp_path / "base"
    packages = base / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (packages / "of_the_user.py").write_text("word = 'installed by the user'")
    monkeypatch.setenv("PYTHONUSERBASE", str(base))
    monkeypatch.setenv("HOME", str(tmp_path))
    python = getattr(sys, "_base_executable", sys.executable)  # in a virtual environment there is no --user
    install = (
        "import os, site; folder = site.getusersitepackages(); os.makedirs(folder, exist_ok=True); "
        "open(os.path.join(folder, 'json.py'), 'w').write('raise SystemExit'); "
        "open(os.path.join(folder, 'planted.py'), 'w').write('')"
    )
    look = "import of_the_user, importlib.util as u; print(of_the_user.word, u.find_spec('planted') is None)"
    grade = "import importlib.util as u; print('{\"reward\": %d}' % (u.find_spec('planted') is None))"
    harnesses = pool(grade_command=[python, "-c", grade])
    monkeypatch.setattr(sys, "executable", python)
    printed, graded = await ran(harnesses, install, look)
    assert (printed, graded.reward) == (["", "installed by the user True\n"], 1.0)
    assert [path.name for path in packages.iterdir() if path.suffix] == ["of_the_user.py"]


@pytest.mark.attack
@pytest.mark.fault("what an agent leaves cannot be looked at or removed, and its episode is void")
async def test_whatever_a_program_leaves_is_graded_and_removed(deep_folder, monkeypatch):
    made = deep_folder / "own"
    monkeypatch.setattr("agent_environments.harness.pool.tempfile.mkdtemp", lambda prefix: str(_made(made)))
    code = (
        "import os; os.mkfifo('pipe'); os.symlink('/', 'root'); os.mkdir(b'\\xff\\n'); top = os.getcwd(); "
        "[(os.mkdir('within'), os.chdir('within')) for _ in range(1200)]; "
        "[os.chmod(os.path.join(top, name), 0) for name in ('within', b'\\xff\\n'.decode('utf-8', 'surrogateescape'))]"
    )
    harnesses = pool(grade_command=[sys.executable, "-c", "print('{\"reward\": 0.5}')"])
    printed, grade = await ran(harnesses, code)
    assert (printed, grade.reward, grade.ungradable) == ([""], 0.5, None)
    assert list(deep_folder.iterdir()) == []


@pytest.mark.attack
@pytest.mark.fault("what an agent leaves cannot be looked at or removed, and its episode is void")
@pytest.mark.parametrize("does", TABLES["the_folder_that_is_graded_is_the_programs_and_no_link"])
async def test_the_folder_that_is_graded_is_the_programs_and_no_link(tmp_path, monkeypatch, does):
    answers = tmp_path / "answers/episode"
    answers.mkdir(parents=True)
    (answers / "answer.txt").write_text("42")
    monkeypatch.setattr("agent_environments.harness.pool.tempfile.mkdtemp", lambda prefix: str(_made(tmp_path / "own")))
    grade = "import os; print('{\"reward\": %d}' % os.path.exists(os.environ['EPISODE_FOLDER'] + '/answer.txt'))"
    answers = str(answers if "here)" in does else answers.parent)
    agent = f"import os; here, answers = os.getcwd(), {answers!r}; own = os.path.dirname(here); {does}"
    printed, graded = await ran(pool(grade_command=[sys.executable, "-c", grade]), agent)
    assert (printed, graded.reward) == ([""], 0.0)
    assert graded.ungradable is None or "the folder that is graded" in graded.ungradable
    assert (tmp_path / "answers/episode/answer.txt").read_text() == "42"
    assert not (tmp_path / "own").exists()


def _made(folder):
    folder.mkdir()
    return folder


@pytest.mark.attack
@pytest.mark.fault("the start of an agent writes into the user's own home")
@pytest.mark.parametrize("key", ["home_template", "task_files"])
async def test_nothing_is_written_through_a_link_of_what_is_copied(tmp_path, key):
    own, template = tmp_path / "own", tmp_path / "template/t_1"
    for folder in (own / "more", template / "kept"):
        folder.mkdir(parents=True)
    (own / "config.toml").write_text("mine")
    (own / "more/loop").symlink_to(tmp_path)
    (template / "kept/file").write_text("file")
    for link, to in {
        "folder": own,
        "file.toml": own / "config.toml",
        "relative": "../../own",
        "nowhere": tmp_path / "gone",
        "loop": "loop",
        "above": "..",
        "inside": "kept/file",
        "absolute": template / "kept",
    }.items():
        (template / link).symlink_to(to)
    code = (
        f"import os; os.chdir(os.environ['HOME'] if {key == 'home_template'} else '.')\n"
        "for name in ('folder/config.toml', 'file.toml', 'relative/config.toml', 'absolute/file', 'nowhere'):\n"
        "    open(name, 'a').write('theirs')\n"
        "print(os.readlink('inside'), open('absolute/file').read())"
    )
    given = {key: str(template if key == "home_template" else template.parent)}
    printed, _ = await ran(pool(**given), code)
    assert printed == ["kept/file filetheirs\n"]
    assert ((own / "config.toml").read_text(), (template / "kept/file").read_text()) == ("mine", "file")
    assert not (tmp_path / "gone").exists()
