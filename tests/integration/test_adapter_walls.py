"""What an interpreter on the real engine holds and shares, seen from outside, with and without bubblewrap.

What it may call is tested in tests/agent_environments/sandbox/test_sandbox.py, what its programs come to in
test_adapter_attacks.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from loop_plumbing.process_guard import descendants
from support.adapter_support import ROOT, fenced, honest_code, needs_world, play, volume_task
from support.episodes import begun_episode
from support.processes import processes

pytestmark = [
    pytest.mark.attack,
    pytest.mark.integration,
    needs_world,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root may look into a sealed process"),
]

KCMP = {"x86_64": 312, "aarch64": 272}
KCMP_FILE = 0


@pytest.fixture(params=["seccomp", "bubblewrap"])
def sealed(request, pool, unguarded):
    """One of the pools that the tests share."""
    sandbox = pool.status().details["sandbox"]
    if sandbox != "bubblewrap" == request.param:
        pytest.skip(f"the strongest sandbox here is {sandbox}")
    return pool if request.param == "bubblewrap" else unguarded


@contextlib.asynccontextmanager
async def interpreter(pool):
    """The pid of a new episode's interpreter, and the episode."""
    folder = str(pool.run_folder.path)
    before = set(processes(folder))
    async with begun_episode(pool, volume_task()[0].task_id) as environment:
        await environment.step(fenced("print(apis.api_docs.show_app_descriptions())"))
        members = [pid for pid in set(processes(folder)) - before if os.getpgid(pid) != pid]
        assert len(members) == 1  # the other new process is the world, which leads the group
        yield members[0], environment


def memory_of(pid: int) -> Iterator[bytes]:
    """What a process has written to memory, region by region."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, *rest = line.split()
            if not rights.startswith("rw") or rest[-1].startswith("[v"):
                continue
            start, end = (int(address, 16) for address in span.split("-"))
            memory.seek(start)
            with contextlib.suppress(OSError):
                yield memory.read(end - start)


async def test_no_interpreter_holds_a_password_or_the_name_of_the_dataset(sealed):
    email = json.loads((ROOT / "data" / "tasks" / sealed._first_task() / "specs.json").read_text())["supervisor"][
        "email"
    ]
    query = "select password from account_passwords join main_users on main_user_id = main_users.id where email = ?"
    with contextlib.closing(sqlite3.connect(ROOT / "data" / "base_dbs" / "admin.db")) as database:
        passwords = [row[0] for row in database.execute(query, [email])]
    assert len(passwords) > 5
    needles = [each.encode() for each in [*passwords, "worlds/synthetic"]]
    async with interpreter(sealed) as (pid, _):
        regions = list(memory_of(pid))
        assert sum(map(len, regions)) > 20 * 2**20
        assert any(b"show_app_descriptions" in region for region in regions)  # it is the right process that was read
        assert [needle for needle in needles if any(needle in region for region in regions)] == []


async def test_the_interpreters_of_two_episodes_share_no_open_file(sealed):
    compare = ctypes.CDLL(None, use_errno=True).syscall
    async with interpreter(sealed) as (one, _), interpreter(sealed) as (other, _):
        for descriptor in (0, 1, 2):
            answer = compare(KCMP[platform.machine()], one, other, KCMP_FILE, descriptor, descriptor)
            if answer < 0:
                pytest.skip(f"kcmp does not work here: {os.strerror(ctypes.get_errno())}")
            assert answer != 0  # 0 would be: the same open file
            assert os.readlink(f"/proc/{one}/fd/{descriptor}") == "/dev/null"
        assert len(os.listdir(f"/proc/{one}/fd")) == 4  # and its channel


async def test_nothing_in_the_run_folder_but_the_graders_view_names_the_dataset(sealed):
    folder = sealed.run_folder
    links = [path for path in folder.path.rglob("*") if path.is_symlink() and folder.grader not in path.parents]
    named = [path for path in links if "synthetic" in os.readlink(path)]
    assert named == []
    assert len(folder.grader.name) > 16
    top, told = sealed._servers["world"].pid, []
    for process in (Path(f"/proc/{pid}") for pid in (top, *descendants(top))):
        with contextlib.suppress(OSError):  # a world of the test before that has just ended
            told.append((process / "cmdline").read_bytes() + (process / "environ").read_bytes())
    assert len(told) >= 3  # the guard, the server and the one that forks interpreters
    assert b"synthetic" not in b"".join(told)


async def test_the_honest_way_is_paid_in_full(sealed):
    card, volume = volume_task()
    _, grade = await play(sealed, card.task_id, [honest_code(card, volume)])
    assert grade.success
