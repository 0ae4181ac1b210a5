"""Runs a command of which no process outlives the owner that asked for it. Linux, standard library only.

    python process_guard.py OWNER_PID GRACE_SECONDS COMMAND...

A vLLM server is several processes, and its engine processes survive a SIGKILL of the one that was started. The guard
stands between: it is the subreaper of everything below it, so no descendant can slip away by losing its parent, and
the kernel signals it when the owner dies, SIGKILL included. It ends with the command's own exit status, and only when
none of the command's descendants is left. The command's temporary folder is the guard's own and goes with it: vLLM
leaves sockets and folders there.

- The owner dies: all descendants get SIGKILL at once.
- The guard gets SIGTERM from a living owner: the command gets SIGTERM, as often as the guard does, and processes that
  are left after the grace SIGKILL.
- The command ends by itself: processes that it left behind get SIGKILL.

The kernel ties "the owner dies" to the *thread* that started the guard, so start it from a thread that lives as long
as the process, such as the main one.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
KILL_DEADLINE_S = 30.0
LONGEST_TMPDIR = 40
"""In bytes. A Unix socket's path has at most 107, of which vLLM's own part below the guard's folder takes up to 50."""

_libc = ctypes.CDLL(None, use_errno=True)


def set_process_control(option: int, value: int) -> None:
    """prctl(2); raises OSError when the kernel refuses."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def children(parent: int) -> list[int]:
    """Return the process ids of the children of ``parent``, zombies included; [] if ``parent`` has ended."""
    pids: list[int] = []
    try:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                pids += map(int, file.read().split())
    except OSError:  # it, or one of its threads, ended while we looked; or a kernel without this file
        return _below().get(parent, [])
    return pids


def descendants(root: int) -> list[int]:
    """Return the process ids below ``root``, from /proc, without zombies."""
    children_of = _below()
    pids, open_ends = [], [root]
    while open_ends:
        below = children_of.get(open_ends.pop(), [])
        pids += below
        open_ends += below
    return pids


def _below() -> dict[int, list[int]]:
    """Return every process's children, without zombies."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it ended while we looked
            continue
        if state != "Z":
            below.setdefault(int(parent), []).append(int(entry))
    return below


def reap() -> dict[int, int]:
    """Collect every child that has ended: process id to exit status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def kill_all_below() -> None:
    """Kill all descendants, repeatedly until none is left, because a process may start another while we look."""
    give_up = time.monotonic() + KILL_DEADLINE_S
    while (left := descendants(os.getpid())) and time.monotonic() < give_up:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
        time.sleep(0.02)
    reap()


def start(command: list[str]) -> int:
    """Fork and exec the command; the child dies with the guard and has default signal handling."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        set_process_control(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def _short_folder() -> str:
    """Return the folder of temporary files; /tmp if its path is too long for the path of a Unix socket in the
    folder."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= LONGEST_TMPDIR else "/tmp"


def main() -> int:
    owner, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # -I leaves it out
    written_tree = importlib.import_module("loop_plumbing.written_tree")
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # before there is a folder that a signal could leave behind
    folder = tempfile.mkdtemp(prefix="guard-", dir=_short_folder())
    os.environ["TMPDIR"] = folder
    try:
        return run(owner, grace, command)
    finally:
        written_tree.remove(folder)


def run(owner: int, grace: float, command: list[str]) -> int:
    """Run the command until none of its processes is left; return the exit status for this process."""
    set_process_control(PR_SET_CHILD_SUBREAPER, 1)
    set_process_control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != owner:  # it died before the line above
        return 1
    child = start(command)
    kill_at: float | None = None
    while True:
        wait = 3600.0 if kill_at is None else max(0.0, kill_at - time.monotonic())
        received = signal.sigtimedwait(WATCHED, wait)
        if received is not None and received.si_signo != signal.SIGCHLD:
            if os.getppid() != owner:
                break
            if kill_at is None:
                kill_at = time.monotonic() + grace
            os.kill(child, signal.SIGTERM)
        ended = reap()
        if child in ended:
            kill_all_below()
            code = os.waitstatus_to_exitcode(ended[child])
            return code if code >= 0 else 128 - code
        if kill_at is not None and time.monotonic() >= kill_at:
            break
    kill_all_below()
    return 128 + signal.SIGKILL


if __name__ == "__main__":
    sys.exit(main())
