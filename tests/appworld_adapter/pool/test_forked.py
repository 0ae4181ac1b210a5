"""How strongly the pool is sealed and how it says so, and the key of log-in tokens; no engine is started."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys

import pytest

from agent_environments.lost_worlds import Losses
from agent_environments.sandbox import SANDBOX_FOLDER
from appworld_adapter.pool import bubblewrap, forked
from appworld_adapter.pool.episode import ForkedWorld
from appworld_adapter.pool.forked import AppWorldPool, token_key
from appworld_adapter.pool.run_folder import WorldFolder
from loop_plumbing import running_time
from support.adapter_support import word_spans
from support.places import check_who_waits_is_refused
from support.processes import write_program
from support.texts import texts_beside

TABLES = texts_beside(__file__)


@pytest.fixture
def dataset(tmp_path):
    root = tmp_path / "dataset"
    for folder in ("datasets", "tasks/abc_1/dbs", "tasks/abc_1/ground_truth", "base_dbs", "api_docs"):
        (root / "data" / folder).mkdir(parents=True)
    (root / "data/tasks/abc_1/ground_truth/answer.json").write_text('"42"')
    with sqlite3.connect(root / "data/base_dbs/admin.db") as database:
        database.execute("create table account_passwords (id integer primary key, password text)")
        database.executemany("insert into account_passwords (password) values (?)", [["one"], ["two"]])
    database.close()
    return root


@pytest.fixture
def run(dataset, tmp_path_factory):
    folder = WorldFolder.create(str(tmp_path_factory.mktemp("r")), dataset, keep=False)
    yield folder
    folder.remove()


def pool_of(dataset, **options) -> AppWorldPool:
    return AppWorldPool(word_spans, python=sys.executable, root=str(dataset), **options)


def server(level: str, readable: tuple[str, ...] = ("/usr/lib",)):
    """What a world server says of itself."""
    return {"level": level, "landlock": 7, "readable": readable}


@pytest.mark.parametrize(("level", "contained", "said"), TABLES["a_level_below_bubblewrap_is_one_warning"])
def test_a_level_below_bubblewrap_is_one_warning(dataset, caplog, level, contained, said):
    pool = pool_of(dataset, sandbox_minimum="none")
    pool._no_bubblewrap = "" if contained else f"bubblewrap is not installed: {bubblewrap.INSTALL}"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # every world asks for its server
            pool._check_level(server(level))
    (record,) = caplog.records
    assert said in record.getMessage()
    assert pool.status().details["sandbox"] == level


def test_bubblewrap_is_no_warning(dataset, caplog):
    pool = pool_of(dataset, sandbox_minimum="bubblewrap")
    pool._check_level(server("bubblewrap"))
    assert caplog.records == []
    assert pool.status().details["sandbox"] == "bubblewrap"


def test_below_the_minimum_nothing_opens_and_a_restart_is_judged_too(dataset):
    with pytest.raises(PermissionError, match=r"'rlimits', below sandbox_minimum 'seccomp': the kernel .* refuses"):
        pool_of(dataset)._check_level(server("rlimits"))
    pool = pool_of(dataset, sandbox_minimum="bubblewrap")
    pool._check_level(server("bubblewrap"))
    pool._no_bubblewrap = "bubblewrap does not work here"
    with pytest.raises(PermissionError, match="bubblewrap does not work here; or lower sandbox_minimum"):
        pool._check_level(server("seccomp"))


def test_a_dataset_that_agent_code_could_read_is_refused(dataset, tmp_path):
    lib = tmp_path / "lib"
    lib.symlink_to(tmp_path)
    pool = pool_of(dataset, sandbox_minimum="none")
    for level in ("seccomp", "bubblewrap"):
        with pytest.raises(PermissionError, match=f"agent code may read {lib}: move the dataset elsewhere"):
            pool._check_level(server(level, readable=("/usr/lib", str(lib))))
        pool._check_level(server(level, readable=(str(tmp_path / "data"),)))
    pool._check_level(server("rlimits", readable=(str(lib),)))  # which says by itself that agent code reads everything


async def test_who_waits_for_a_place_is_refused_when_the_pool_closes(dataset):
    await check_who_waits_is_refused(pool_of(dataset, max_worlds=1))


async def test_why_bubblewrap_is_not_used(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(bubblewrap.shutil, "which", lambda name: None)
        with pytest.raises(OSError, match="not installed: apt-get install bubblewrap"):
            await bubblewrap.bubblewrap_prefix(sys.executable, run)
    fake = tmp_path / "bwrap"
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: str(fake))
    for program, complaint in (
        ("echo 'No permissions to create new namespace' >&2; exit 1", r"does not work here .*No permissions"),
        ("echo True", "would show the dataset"),
    ):
        write_program(fake, program)
        with pytest.raises(OSError, match=complaint):
            await bubblewrap.bubblewrap_prefix(sys.executable, run)


def test_the_run_folder_shows_worlds_a_copy(run):
    run.grader.relative_to(run.path)
    assert [path for path in run.agent.rglob("*") if path.is_symlink()] == []
    assert (run.agent / "data" / "base_dbs" / "admin.db").is_file()
    assert (run.grader / "data" / "tasks" / "abc_1" / "ground_truth").is_dir()
    run.remove()
    assert not run.path.exists()


def test_a_token_tests_no_guess_of_an_answer(dataset):
    pool = pool_of(dataset)
    pool._token_key = key = token_key(dataset)
    assert pool._token_secret("abc_1") != pool._token_secret("abc_2")
    (dataset / "data/tasks/abc_1/ground_truth/answer.json").write_text('"43"')
    assert token_key(dataset) == key  # the same in every run, whatever the answer is
    with sqlite3.connect(dataset / "data/base_dbs/admin.db") as database:
        database.execute("update account_passwords set password = 'three' where id = 1")
    database.close()
    assert token_key(dataset) != key
    (dataset / "data/base_dbs/admin.db").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"no passwords in .*make world"):
        token_key(dataset)


class Process:
    """A world process that gives one answer, and then ends."""

    killed = False

    def __init__(self, answer) -> None:
        self._answer = answer
        self.ended = asyncio.get_running_loop().create_future()

    async def exchange(self, request):
        return self._answer

    async def has_server(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "noted"),
    TABLES["an_end_excuses_neighbours_unless_a_program_brought_it_about"],
    ids=["between two programs", "as its program broke it"],
)
async def test_an_end_excuses_neighbours_unless_a_program_brought_it_about(answer, noted):
    losses, process = Losses(), Process(answer)
    world = ForkedWorld(process, losses)
    await world.execute("code")
    process.ended.set_result(0)
    await asyncio.sleep(0)
    assert losses.alone("a neighbour", running_time.now()) is not noted


def test_levels_are_those_of_the_sandbox():
    sys.path.insert(0, str(SANDBOX_FOLDER))
    import sandbox

    assert forked.SANDBOX_LEVELS == sandbox.LEVELS
