"""The walls of the level "seccomp" against the running kernel: each way out that attackers found, as root and as
nobody, with and without bubblewrap, and with the Landlock of other kernels (0: none, 4: Linux 6.7, 7: Linux 6.15). And
what two sealed processes can tell each other.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_environments.sandbox import SANDBOX_FOLDER
from appworld_adapter.pool import bubblewrap
from support import sealed_calls, sealed_channels
from support.waiting import COMMAND_S

pytestmark = pytest.mark.attack

NOBODY = 65534
IPC_CREAT, IPC_RMID = 0o1000, 0

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def secret(tmp_path_factory):
    """A file that anybody on the machine may read, outside Python's folders."""
    folder = tmp_path_factory.mktemp("dataset", numbered=True)
    for parent in (folder, *folder.parents):
        if parent != Path("/tmp") and parent.is_relative_to("/tmp"):
            parent.chmod(0o755)
    path = folder / "answer.json"
    path.write_text('"42"')
    path.chmod(0o666)
    return path


@pytest.fixture
def queue():
    """A System V message queue of ours with one message in it, open to all."""
    number = _libc.msgget(0, IPC_CREAT | 0o666)
    _libc.msgsnd(number, b"\1\0\0\0\0\0\0\0hello", 5, 0)
    yield number
    _libc.msgctl(number, IPC_RMID, None)


@pytest.fixture
def segment():
    number = _libc.shmget(0, 4096, IPC_CREAT | 0o666)
    yield number
    _libc.shmctl(number, IPC_RMID, None)


@pytest.mark.parametrize("folder", [False, True], ids=["", "a folder of its own"])
@pytest.mark.parametrize("landlock", [0, 4, 7])
@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("contained", [False, True], ids=["seccomp", "bubblewrap"])
def test_no_call_reaches_out(contained, user, landlock, folder, secret, queue, segment):
    if folder and (contained or landlock == 0):
        pytest.skip("a folder is given by Landlock, and by no one else")
    if user == "root" and os.getuid() != 0:
        pytest.skip("needs root")
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if user == "nobody" and os.getuid() == 0 else {}
    pythons = {sys.executable: [sys.prefix, sys.base_prefix], "/usr/bin/python3": []}
    command = _runs(
        [[*_prefix(secret.parent, shown, contained), python] for python, shown in pythons.items()], identity
    )
    victim = subprocess.Popen(["sleep", "600"], **identity)
    told = {"sandbox": str(SANDBOX_FOLDER), "landlock": landlock, "secret": str(secret), "victim": victim.pid}
    told |= {"queue": queue, "segment": segment, "folder": None}
    if folder:
        own = secret.parent / "own"
        own.mkdir()
        own.chmod(0o777)
        told["folder"] = str(own)
    try:
        command += [sealed_calls.__file__, json.dumps(told)]
        result = subprocess.run(command, input="", capture_output=True, text=True, timeout=COMMAND_S, **identity)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["through"] == []
        assert report["tried"] >= 50
        assert secret.read_text() == '"42"'
        assert victim.poll() is None
        assert _libc.msgrcv(queue, ctypes.create_string_buffer(64), 16, 0, 0o4000) == 5  # IPC_NOWAIT; nobody took it
    finally:
        victim.kill()
        victim.wait()


def test_two_sealed_processes_tell_each_other_nothing():
    command = [sys.executable, sealed_channels.__file__, str(SANDBOX_FOLDER)]
    with subprocess.Popen([*command, "hear"], stdout=subprocess.PIPE, text=True) as hearing:
        assert hearing.stdout is not None
        assert hearing.stdout.readline() == "ready\n"
        told = subprocess.run([*command, "tell"], capture_output=True, text=True, timeout=COMMAND_S)
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout) == 0, "somebody heard it"
        assert json.loads(hearing.stdout.readline()) is False


def _prefix(run_folder: Path, python_folders: list[str], contained: bool) -> list[str]:
    if not contained:
        return []
    program = shutil.which("bwrap")
    if program is None:
        pytest.skip("bubblewrap is not installed")
    return bubblewrap._arguments(program, [*python_folders, str(Path(sealed_calls.__file__).parent)], run_folder)


def _runs(commands: list[list[str]], identity: dict[str, Any]) -> list[str]:
    """The first of ``commands`` that starts a Python for this user; its installation may be closed to others."""
    why = ""
    for command in commands:
        try:
            result = subprocess.run([*command, "-c", "pass"], capture_output=True, text=True, **identity)
        except OSError as error:
            why = str(error)
            continue
        if result.returncode == 0:
            return command
        why = result.stderr
    pytest.skip(f"no Python starts this way: {why.strip()}")


@pytest.mark.parametrize("kept", [{1}, {0, 1, 2, 5}, {1, 5, 9}])
def test_descriptors_that_are_not_kept_are_closed(kept):
    code = f"""
import os, sys
sys.path.insert(0, {str(SANDBOX_FOLDER)!r})
import sandbox
for number in (3, 4, 5, 9, 12):
    os.dup2(1, number)
sandbox.close_descriptors_except({kept!r})
alive = []
for number in range(20):
    try:
        os.fstat(number)
    except OSError:
        continue
    alive.append(number)
print(alive)
"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=COMMAND_S)
    assert ended.stdout.strip() == str(sorted(kept))
