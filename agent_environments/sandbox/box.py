"""The walls of a box: bubblewrap's command for a program that sees the system's programs and nothing else.

Inside there are the system's programs and libraries and one interpreter with its standard library, all read-only;
process ids, a network with nothing on it, IPC and users of its own; no variables but those that are named here.
Packages beside the interpreter or the node are hidden. The first process (keeper.py) adds the folder that may be
written to. AppWorld uses :func:`system_arguments` too.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

PROGRAM = "/run/program"
"""The folder with the files of the first process, inside the box."""
PACKAGES = "/run/packages"
OLDEST = (0, 8)
TRIAL_S = 60.0
NOBODY = "65534"
_LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SHOWN = (
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/include", "/usr/share"),
    *("/usr/local/bin", "/usr/local/lib", "/etc/alternatives", "/etc/fonts", "/etc/ld.so.cache"),
)
_VARIABLES = {
    **{"PATH": "/run/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": PACKAGES},
    **{name: "agent" for name in ("USER", "LOGNAME")},
    **{"HOME": "/box", "LANG": "C.UTF-8", "TERM": "dumb", "MPLBACKEND": "agg"},
    # Sets iterate in the same order in every box. Threads and arenas reserve addresses, which are bounded.
    **{"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "1"},
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
}


class NoBox(Exception):
    """No box can be made here; the message says why."""


def system_arguments(paths: Iterable[str]) -> list[str]:
    """Return bubblewrap's arguments that show the existing ones among ``paths``, and the root's links to them."""
    arguments: list[str] = []
    for path in dict.fromkeys([*_LINKED, *paths]):
        if os.path.islink(path) and path in _LINKED:
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    return arguments


def box_command(program: str, packages: Mapping[str, str], hidden: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the command that runs ``keeper.py`` in the folder ``program`` with the arguments ``words``, in a box.

    Args:
        packages: the interpreter's packages that the box shows: name in a folder of packages -> path.
        hidden: folders that the box never shows, such as those that the node imports from.

    Raises:
        NoBox: bubblewrap is missing, too old or setuid, or does not work here.
        ImportError: a package cannot be imported in a box.
    """
    bwrap = _bubblewrap()
    python = os.path.realpath(sys.executable)
    visible = _outermost([*_SHOWN, python, f"{sys.base_prefix}/lib", sysconfig.get_path("stdlib")])
    beside = [path for folder in visible for path in glob.glob(f"{folder}/python*/*-packages")]
    covered = _outermost([path for path in [*beside, *hidden] if os.path.isdir(path) and below(path, visible)])
    inside = system_arguments(visible)
    for path in covered:
        inside += ["--tmpfs", path, "--remount-ro", path]
    for name, path in packages.items():
        inside += ["--ro-bind", path, f"{PACKAGES}/{name}"]
    command = [bwrap, "--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--as-pid-1", "--die-with-parent"]
    command += ["--new-session", "--hostname", "box", "--clearenv", *inside]
    # To mount its folder, to make its processes users of namespaces of theirs, and to see what memory they have.
    command += [word for name in ("SYS_ADMIN", "SETFCAP", "SYS_PTRACE") for word in ("--cap-add", f"CAP_{name}")]
    command += ["--ro-bind", program, PROGRAM, "--symlink", python, "/run/bin/python3", "--proc", "/proc"]
    command += ["--dev", "/dev", "--remount-ro", "/dev", "--dir", "/box", "--dir", "/tmp", "--dir", "/etc"]
    for name, value in _VARIABLES.items():
        command += ["--setenv", name, value]
    command += ["--", python, f"{PROGRAM}/keeper.py", *words]
    if os.getuid() != 0:
        return _working([command])
    # The kernel bounds no number of processes for real root, so the box belongs to another user, who reaches nothing in
    # root's home but the files that root itself has shown before.
    other = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *command]
    reached = [*visible, program, *packages.values(), "/run"]
    above = {str(parent) for path in reached for parent in PurePath(path).parents} - {"/"}
    before = [bwrap, "--die-with-parent", *(word for path in sorted(above) for word in ("--dir", path))]
    before += [*system_arguments([*reached, "/etc"]), "--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--"]
    return _working([other, [*before, *other]])


def _bubblewrap() -> str:
    program = shutil.which("bwrap")
    if program is None:
        raise NoBox("bubblewrap is not installed (apt-get install bubblewrap)")
    if os.stat(program).st_mode & stat.S_ISUID:
        raise NoBox(f"{program} is setuid, and may do more than its caller")
    version_text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=TRIAL_S).stdout
    version = tuple(map(int, re.findall(r"\d+", version_text)[:2]))
    if version < OLDEST:
        raise NoBox(f"{version_text.strip() or program} is older than {'.'.join(map(str, OLDEST))}")
    return program


def _working(commands: Sequence[list[str]]) -> list[str]:
    """Return the first command whose trial run, without a connection to an owner, works; raises NoBox if all fail."""
    why = ""
    for command in commands:
        try:
            tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIAL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
            continue
        why = (tried.stderr or tried.stdout).strip().rpartition("\n")[2]
        if tried.returncode == 0 and not why:
            return command
        if tried.returncode == 0:
            raise ImportError(f"a package cannot be used in a box: {why}")
    raise NoBox(f"bubblewrap does not work here ({why})")


def below(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path lies below one of the folders."""
    return any(path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths, without each that lies below another."""
    return [path for path in dict.fromkeys(paths) if not below(path, paths)]
