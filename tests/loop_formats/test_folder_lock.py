"""A folder has one writer at a time: the second is refused in one line, and a dead one holds nothing."""

import errno
import os
import re
import signal
import subprocess
import sys

import pytest

from loop_formats.folder_lock import is_locked, lock_folder, lock_run
from loop_formats.schema import ConfigError
from support.texts import texts_beside

TABLES = texts_beside(__file__)

HOLDER = TABLES["holder"]


@pytest.mark.slow
def test_who_holds_a_folder_is_named_until_it_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            line = rf"^another run is using {re.escape(str(tmp_path))} \(-c, process {holder.pid} on .*, since .*\); "
            for _ in range(2):  # being refused changes nothing
                with pytest.raises(ConfigError, match=line):
                    lock_run(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    with lock_run(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} "):
        lock_run(tmp_path)
    lock_run(tmp_path).close()


@pytest.mark.slow
def test_children_do_not_hold_what_their_parent_held(tmp_path):
    with lock_run(tmp_path):
        child = subprocess.Popen(["sleep", "3600"], close_fds=False)
    try:
        lock_run(tmp_path).close()
    finally:
        child.kill()
        child.wait()


def test_a_full_disk_takes_the_name_and_not_the_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patches:
        patches.setattr(os, "write", full)
        lock = lock_folder(tmp_path, "a.lock", "rollout node", "root")
    with (
        lock,
        pytest.raises(ConfigError, match=f"^another rollout node is using {tmp_path}; wait for its end, stop it"),
    ):
        lock_folder(tmp_path, "a.lock", "rollout node", "root")


@pytest.mark.fault("on SMB, FUSE or 9p no checkpoint is written, because a call is refused that can be done without")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL])
def test_a_file_system_without_locks_is_refused_with_the_cure_and_nobody_holds_one_there(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    lock_run(tmp_path).close()
    monkeypatch.setattr("fcntl.flock", refuse)
    line = f"^{tmp_path} cannot be locked: {os.strerror(number)}; mount its file system with flock, or choose another"
    with pytest.raises(ConfigError, match=line):
        lock_run(tmp_path)
    assert not is_locked(tmp_path, "run.lock")
