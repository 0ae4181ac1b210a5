"""Forks a process for each episode that runs an agent's code: the first one of a box or, where none can be made, one
that keeps a sealed interpreter (agent_environments/sandbox).

    python code_server.py SOCKET

Runs under the agent's interpreter. The first line of standard input is a JSON object: ``tools``, ``packages``,
``hidden`` (folders that a box never shows), ``memory_mb``, ``folder_mb``, ``deadline_s`` and ``max_characters``. It is
ready with ``sealed``: why there is no box, or null. ``cgroup`` is a folder for a cgroup of each box, or null.
"""

from __future__ import annotations

import compileall
import contextlib
import functools
import glob
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Our own packages, behind those of this interpreter; and files that import each other by name.
sys.path.append(
    next(str(above) for above in Path(__file__).resolve().parents if (above / "agent_environments").is_dir())
)
sys.path.insert(0, f"{sys.path[-1]}/loop_plumbing")
sys.path.insert(0, f"{sys.path[-1]}/agent_environments/sandbox")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import bounded_text
import box
import interpreter
import keeper
import opened_files
import sandbox
import syscalls
import written_tree

from loop_plumbing import fork_server

del sys.path[:3], sys.path[-1]  # code of agents has no use for them
CONNECTION = 3
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The file that bounds a cgroup's memory, of version 2 and 1."""
BOX_OVERHEAD_MB = 160
"""Memory of the processes of a box itself, two interpreters among them, beside the agent's."""
_OWN_KEYS = ("tools", "packages", "hidden", "cgroup")
"""Keys of the config that a box does not get, as an agent could read them there."""


def package_files(names: Sequence[str]) -> dict[str, str]:
    """Return name -> path of the given packages and modules, and of all that their distributions require. The name is
    that of the file or folder in the box's folder of packages.

    Raises:
        ImportError: a package is not installed.
    """
    paths: dict[str, str] = {}
    for name in names:
        spec = importlib.util.find_spec(name.partition(".")[0])
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        for path in spec.submodule_search_locations or [spec.origin or ""]:
            if "-packages" in path:
                paths[os.path.basename(path)] = path
    providers = importlib.metadata.packages_distributions() if names else {}
    waiting = [each for name in names for each in providers.get(name.partition(".")[0], [])]
    for each in waiting:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not needed here
            distribution = importlib.metadata.distribution(each)
            tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
            paths |= {top: str(distribution.locate_file(top)) for top in tops}
            needed = [re.split(r"[^\w.-]", line)[0] for line in distribution.requires or () if "extra ==" not in line]
            waiting += [name for name in needed if name not in waiting]
    return paths


def prepare(config: Mapping[str, Any], folder: str) -> fork_server.Prepared:
    """Check that a box can be made, or else an interpreter sealed, and that it can import the packages."""
    packages = package_files(config["packages"])
    os.umask(0o022)  # a box is another user's
    os.chmod(folder, 0o755)
    for module in (bounded_text, keeper, sandbox, syscalls, interpreter, written_tree):
        shutil.copyfile(module.__file__, os.path.join(folder, os.path.basename(module.__file__)))
    compileall.compile_dir(folder, quiet=2)
    trial = "".join(f"import {name}\n" for name in config["packages"])
    try:
        limits = json.dumps({name: value for name, value in config.items() if name not in _OWN_KEYS} | {"trial": trial})
        command = box.box_command(folder, packages, config["hidden"], [limits])
        group = memory_group(config)
        if group is not None:
            os.rmdir(group)  # it was a trial
        return fork_server.Prepared(functools.partial(be_first, config, [*command, str(CONNECTION)]), {"sealed": None})
    except box.NoBox as error:
        if "shell" in config["tools"]:
            raise
        why = str(error)
    exposed = [path for path in config["hidden"] if os.path.isdir(path) and box.below(path, sandbox.readable_folders())]
    if exposed:
        raise OSError(f"{why}, and a sealed interpreter could read {exposed[0]}: give code.python another one")
    for name in config["packages"]:
        importlib.import_module(name)
    opened_files.load_standard_library()
    if sandbox.landlock_abi() < sandbox.WRITING_ABI or sandbox.probe() != "seccomp":
        raise OSError(f"{why}, and a sealed interpreter needs Linux 6.2 with Landlock and seccomp: no code is run")
    return fork_server.Prepared(functools.partial(seal, config), {"sealed": why})


def memory_group(config: Mapping[str, Any]) -> str | None:
    """Make a cgroup for this process that bounds a box's memory and files. Return its path; None without ``cgroup``.

    Raises:
        OSError: the cgroup cannot be made.
    """
    parent = config["cgroup"]
    if parent is None:
        return None
    for name in glob.glob("box-*", root_dir=parent):
        if not os.path.exists(f"/proc/{name.removeprefix('box-')}"):
            with contextlib.suppress(OSError):
                os.rmdir(f"{parent}/{name}")
    try:
        group = f"{parent}/box-{os.getpid()}"
        os.mkdir(group)
        limit = next(f"{group}/{file}" for file in LIMITS if os.path.exists(f"{group}/{file}"))
        size = config["memory_mb"] + config["folder_mb"] + BOX_OVERHEAD_MB
        Path(limit).write_text(str(size << 20))
        return group
    except (OSError, StopIteration) as error:
        raise OSError(f"code.cgroup: no cgroup that bounds memory can be made in {parent} ({error})") from error


def be_first(config: Mapping[str, Any], command: list[str], connection: socket.socket) -> None:
    """Turn this process into a box. The first process in the box answers on ``connection``."""
    if (group := memory_group(config)) is not None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    os.dup2(connection.fileno(), CONNECTION)
    sandbox.silence((0, 1))
    os.closerange(CONNECTION + 1, 1 << 16)
    os.chdir("/")
    os.execv(command[0], command)


def seal(config: Mapping[str, Any], connection: socket.socket) -> None:
    """Serve a sealed interpreter, which can read and write only in this process's folder."""
    sandbox.silence((0, 1))
    sandbox.close_descriptors_except({0, 1, 2, connection.fileno()})
    folder = os.getcwd()

    def walls() -> None:
        sandbox.die_with_parent()
        opened_files.install()
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder)
        limits = {"memory_mb": config["memory_mb"], "file_bytes": config["folder_mb"] << 19}
        sandbox.confine({"level": "seccomp", "folder": folder, **limits})

    sandbox.undumpable()
    keeper.Keeper(config, walls, folder).serve(connection.detach())


def main() -> None:
    config = json.loads(sys.stdin.readline())
    folder = tempfile.mkdtemp(prefix="code-")
    try:
        fork_server.serve(socket.socket(fileno=int(sys.argv[1])), lambda: prepare(config, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
