"""Folders that an agent has written, whatever it wrote there, as root and as an ordinary user."""

import os
import socket
import sys
import traceback

import pytest

from loop_plumbing.written_tree import remove, walk

pytestmark = [
    pytest.mark.attack,
    pytest.mark.fault("what an agent leaves cannot be looked at or removed, and its episode is void"),
]
NOBODY = 65534
DEEP = 1200
"""Folders within each other: the kernel takes no such path (4,096 bytes), and Python recurses less deep."""


def write(folder, name, content=b"", mode=0o600):
    descriptor = os.open(name, os.O_CREAT | os.O_WRONLY, mode, dir_fd=folder)
    os.write(descriptor, content)
    os.close(descriptor)


def deep(root):
    here = os.open(root, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("within", dir_fd=here)
        below = os.open("within", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    write(here, "bottom", b"deep")
    os.close(here)


def shut(root):
    os.makedirs(f"{root}/shut/within")
    for name in ("shut/file", "shut/within/file"):
        write(None, f"{root}/{name}", b"shut", 0)
    os.chmod(f"{root}/shut/within", 0)
    os.chmod(f"{root}/shut", 0o100)
    os.chmod(root, 0)


def names(root):
    folder = os.open(root, os.O_RDONLY)
    for name in (b"a\nb", b"\xff", b"\xfe", b"-rf", "\udcff".encode("utf-8", "surrogatepass"), b"x" * 255):
        write(folder, name, b"named")
    os.close(folder)


def special(root):
    os.mkfifo(f"{root}/pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{root}/socket")
    for link, to in {"out": "/etc/passwd", "above": "..", "root": "/", "itself": "itself", "nowhere": "gone"}.items():
        os.symlink(to, f"{root}/{link}")


def sparse(root):
    with open(f"{root}/sparse", "wb") as file:
        file.truncate(1 << 40)


def reserved(root):
    descriptor = os.open(f"{root}/reserved", os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(descriptor, 0, 2 << 20)
    os.ftruncate(descriptor, 2 << 20)
    os.close(descriptor)


def many(root):
    for number in range(300):
        os.mkdir(f"{root}/{number}")


def linked(root):
    os.rmdir(root)
    os.symlink("/etc", root)


LEFT = {deep: DEEP + 1, shut: 4, names: 6, special: 7, sparse: 1, reserved: 1, many: 300, linked: 0}
"""How many things each leaves."""


def check(root, left):
    os.mkdir(root)
    left(root)
    mode = os.lstat(root).st_mode
    open_before = len(os.listdir("/proc/self/fd"))
    assert sum(1 for _ in walk(root)) == LEFT[left]
    assert os.lstat(root).st_mode == mode
    remove(root)
    remove(root)
    assert not os.path.lexists(root)
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert os.path.exists("/etc/passwd")


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("left", LEFT, ids=lambda left: left.__name__)
def test_whatever_an_agent_leaves_is_looked_at_and_removed(left, user, deep_folder):
    if user == "root" and os.getuid() != 0:
        pytest.skip("needs root")
    deep_folder.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            if user == "nobody" and os.getuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            check(str(deep_folder / "own"), left)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_folder_that_is_moved_away_while_it_is_looked_at_leads_nowhere_else(tmp_path):
    (tmp_path / "own/within/deeper").mkdir(parents=True)
    (tmp_path / "kept/within").mkdir(parents=True)
    walking = walk(tmp_path / "own")
    (tmp_path / "own/within/deeper/file").touch()
    assert next(walking).name == "file"
    os.rename(tmp_path / "own/within/deeper", tmp_path / "kept/deeper")
    assert [written.name for written in walking] == []
