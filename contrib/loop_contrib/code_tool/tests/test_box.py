"""What a box keeps in and out: what an agent runs there reaches nothing, runs when it is asked to, and is bounded."""

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from agent_environments.tools.tool import ToolError
from loop_contrib.code_tool.python_tool import PythonSessions
from loop_plumbing.process_guard import descendants
from support.listener import Listener

pytestmark = pytest.mark.slow
ATTACKS = yaml.safe_load(Path(__file__).with_name("box_attacks.yaml").read_text())
LIMITS = {"tools": ["python", "shell"], "folder_mb": 4, "memory_mb": 256, "deadline_s": 20}


class Box:
    """The tools of one episode; a failure is what the agent reads."""

    def __init__(self, sessions):
        self.sessions, self.session = sessions, sessions.session()
        self.session.give({"given.txt": "given"})

    async def _call(self, number, **arguments):
        try:
            return (await self.session.tools[number].call(arguments, None)).strip()
        except ToolError as error:
            return f"ToolError: {error}"

    async def python(self, code):
        return await self._call(0, code=code)

    async def shell(self, command):
        return await self._call(1, command=command)

    def processes(self):
        return descendants(self.sessions._server.pid)


async def opened(**limits):
    sessions = PythonSessions({**LIMITS, **limits})
    try:
        await sessions.open()
    except ValueError as error:
        await sessions.close()
        if "bubblewrap" in str(error):
            pytest.skip(str(error))
        raise
    return sessions


@pytest.fixture
async def box(request):
    sessions = await opened(**getattr(request, "param", {}))
    box = Box(sessions)
    yield box
    await box.session.close()
    await sessions.close()


async def test_both_tools_have_one_folder_and_each_keeps_its_own(box):
    assert await box.shell("cat given.txt; echo 'x = 5' > mod.py; cd /tmp; N=3") == "given"
    assert await box.python("import mod\nmod.x, open('given.txt').read()") == "(5, 'given')"
    assert await box.shell("echo $N $PWD; python3 -c 'print(6 * 7)'; false") == "3 /tmp\n42\nexit status 1"
    assert await box.shell("if then") != "(nothing was printed)"
    assert "status 7; variables are gone, files are kept" in await box.shell("exit 7")
    assert await box.shell("echo [$N] $PWD; cat mod.py") == "[] /box\nx = 5"
    assert (await box.session.left_files()).keys() == {"given.txt", "mod.py"}


@pytest.mark.parametrize("name", ATTACKS["reading"])
async def test_nothing_else_is_in_reach(name, tmp_path, monkeypatch):
    """From both tools; then the box goes on."""
    monkeypatch.setenv("WANDB_API_KEY", "the canary sings")
    secret = tmp_path / "secret.txt"
    secret.write_text("the canary sings")
    listener = Listener()
    sessions = await opened()
    box = Box(sessions)
    try:
        values = {"secret": secret, "folder": tmp_path, "port": listener.port, "name": "loop"}
        command = ATTACKS["reading"][name]
        for word, value in values.items():
            command = command.replace(f"{{{word}}}", str(value))
        shown = await box.shell(command)
        shown += await box.python(f"import subprocess\nprint(subprocess.getoutput({command!r}))")
        assert "the canary sings" not in shown
        assert "REACHED" not in shown
        assert not listener.visited()
        assert await box.python("6 * 7") == "42"
        assert await box.shell("echo on") == "on"
    finally:
        await box.session.close()
        await sessions.close()


async def test_neighbours_are_out_of_sight(box):
    other = Box(box.sessions)
    await other.shell("echo secret > /box/own; echo secret > /tmp/own; echo secret > /dev/shm/own; sleep 1000 &")
    shown = await box.shell("ls /box /tmp /dev/shm; ps ax; cat /proc/[2-9]*/root/box/own; ipcs -a; kill -9 -1")
    assert "own\n" not in shown
    assert "secret" not in shown
    assert await other.shell("cat /box/own") == "secret"
    await other.session.close()


def prefix_with_tasks():
    """In a place of its own, as a box has its own /tmp."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(tempfile.mkdtemp(dir="/var/tmp"))
    prefix.chmod(0o755)
    left_out = shutil.ignore_patterns("*-packages", "test", "__pycache__", "config-*", "idlelib", "tkinter")
    shutil.copytree(sysconfig.get_path("stdlib"), prefix / "lib" / version, ignore=left_out)
    (prefix / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), prefix / "bin" / version)
    packages = prefix / "lib" / version / "site-packages"
    packages.mkdir()
    (packages / "my_tasks.py").write_text("TASKS = 'the canary sings'\n")
    (packages / "helper.py").write_text("x = 5\n")
    return prefix


@pytest.mark.fault("agent code reads the tasks' answers where there is no virtual environment")
async def test_what_is_installed_beside_the_interpreter_is_not_shown():
    """A prefix of its own, as a container's image has, with the tasks in its folder of packages."""
    prefix = await asyncio.to_thread(prefix_with_tasks)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = prefix / "lib" / version / "site-packages"
    sessions = await opened(python=str(prefix / "bin" / version), packages=["helper"])
    box = Box(sessions)
    try:
        assert str(prefix) in await box.python("import sys\nsys.prefix")
        shown = await box.python("import my_tasks\nmy_tasks.TASKS")
        shown += await box.shell(f"cat {packages}/my_tasks.py; grep -r canary {prefix}/lib/{version}/*-packages")
        assert "ModuleNotFoundError" in shown
        assert "the canary" not in shown
        assert await box.python("import helper\nhelper.x") == "5"
    finally:
        await box.session.close()
        await sessions.close()
        shutil.rmtree(prefix)


@pytest.mark.fault("code of an agent goes on between two turns")
@pytest.mark.parametrize("name", ATTACKS["going_on"])
async def test_nothing_runs_between_turns(box, name):
    def used():
        ticks = 0
        for pid in box.processes():
            try:
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            except OSError:
                continue
        return ticks / os.sysconf("SC_CLK_TCK")

    await box.python(ATTACKS["going_on"][name])
    await asyncio.sleep(0.2)
    before = used()
    await asyncio.sleep(3)
    assert used() - before < 0.15
    shown = [await box.shell("echo on") for _ in range(2)]
    assert "on" in shown[1].splitlines()


@pytest.mark.attack
@pytest.mark.fault("an answer that comes late is taken for that of the next call")
@pytest.mark.parametrize("name", ATTACKS["forged"])
async def test_each_call_has_its_own_answer(box, name):
    await box.python("import os")
    shown = [await box.python(ATTACKS["forged"][name])]
    for number in range(3):
        shown.append(await box.python(f"print('call', {number})"))
        assert f"call {number}" in shown[-1].splitlines()
        assert f"shell {number}" in (await box.shell(f"echo shell {number}")).splitlines()
    assert sum("late" in text.splitlines() for text in shown) <= 1


async def test_what_runs_in_the_background_goes_on_with_the_next_call(box):
    await box.shell("python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &\nsleep 2")
    assert "given.txt" in await box.python(
        "import time, urllib.request\n"
        "for _ in range(50):\n    try: page = urllib.request.urlopen('http://localhost:8123/').read(); break\n"
        "    except OSError: time.sleep(0.2)\nprint(page)"
    )


@pytest.mark.fault("memory is bounded for each process, and not for all together")
async def test_memory_is_bounded_over_processes(box):
    assert "its processes together took more than 256 MiB of memory; variables are gone" in await box.python(
        ATTACKS["memory"]["memory of six"]
    )
    assert await box.python("6 * 7") == "42"
    assert await box.python(ATTACKS["memory"]["memory that six share"]) == "42", "pages that are shared count once"


@pytest.fixture
def cgroup():
    """A cgroup with a memory controller, where this user may make one."""
    for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        try:
            folder = Path(tempfile.mkdtemp(prefix="boxes-", dir=root))
        except OSError:
            continue
        if any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            yield folder
            while subprocess.run(["rmdir", *folder.glob("box-*"), folder], stderr=subprocess.DEVNULL).returncode:
                time.sleep(0.1)  # its processes are ending
            return
        folder.rmdir()
    pytest.skip("this user may make no cgroup")


@pytest.mark.attack
@pytest.mark.fault("memory is bounded for each process, and not for all together")
async def test_a_cgroup_bounds_memory_faster_than_it_can_be_looked_at(cgroup):
    """By processes that each stay below their own bound, and for less time than there is between two looks."""
    sessions = await opened(cgroup=str(cgroup), memory_mb=128)
    box = Box(sessions)
    taking = "x = bytearray(b'x') * (100 << 20)"
    await box.shell(f'for n in 1 2 3 4 5 6 7 8; do python3 -c "{taking}" & done; wait')
    shown = [await box.shell("echo on") for _ in range(2)]
    assert "on" in shown[1].splitlines()
    [group] = cgroup.glob("box-*")
    peak = next(group / name for name in ("memory.peak", "memory.max_usage_in_bytes") if (group / name).exists())
    assert 100 << 20 < int(peak.read_text()) <= (128 + 4 + 160) << 20
    await box.session.close()
    await sessions.close()


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="a sealed interpreter could read what this one imports")
async def test_a_cgroup_that_bounds_nothing_is_refused(tmp_path):
    sessions = PythonSessions({"cgroup": str(tmp_path / "none")})
    with pytest.raises(ValueError, match=r"code.cgroup: no cgroup that bounds memory|bubblewrap"):
        await sessions.open()
    await sessions.close()


@pytest.mark.parametrize("box", [{"deadline_s": 3}], indirect=True)
@pytest.mark.parametrize(
    "bomb",
    [
        "f() { f | f & }; f; sleep 2",
        "python3 -c 'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass'",
    ],
)
async def test_processes_are_bounded(box, bomb):
    running = asyncio.ensure_future(box.shell(bomb))
    most = 0
    while not running.done():
        most = max(most, len(box.processes()))
        await asyncio.sleep(0.1)
    assert most < 150
    shown = [await box.python("6 * 7") for _ in range(2)]
    assert "42" in shown[0].splitlines() + shown[1].splitlines()


async def test_a_long_line_is_bounded_and_does_not_hold_the_node(box):
    longest, last = 0.0, time.monotonic()

    async def look():
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    looking = asyncio.ensure_future(look())
    shown = await box.python(
        "import os\nfor d in range(1, 300):\n    try: os.write(d, b'{},' * (21 << 20))\n    except OSError: pass"
    )
    shown += await box.python("print('x' * (63 << 20)); raise ValueError('y' * (63 << 20))")
    looking.cancel()
    assert len(shown) < 3 * 2048
    assert longest < 2.0


@pytest.mark.fault("a folder that an agent has made odd cannot be looked at or removed")
@pytest.mark.parametrize("name", ATTACKS["left"])
async def test_whatever_is_left_is_read_and_goes(box, name):
    await box.python(ATTACKS["left"][name])
    left = await box.session.left_files()
    assert left["given.txt"] == b"given"
    assert name != "closed" or left["c/x"] == b"in"
    assert not any(b"root" in content for content in left.values())
    await box.session.close()
    assert (await Box(box.sessions).python("import os\nos.listdir('.')")) == "['given.txt']"


@pytest.mark.parametrize(("program", "why"), ATTACKS["no_box"])
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="a sealed interpreter could read what this one imports")
async def test_where_there_is_no_box_one_line_says_so(tmp_path, monkeypatch, caplog, program, why):
    if program:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin" if program else f"{tmp_path}")
    sessions = PythonSessions("python")
    await sessions.open()
    assert why in caplog.text
    await sessions.close()
    sessions = PythonSessions("shell")
    with pytest.raises(ValueError, match=why):
        await sessions.open()
    await sessions.close()
