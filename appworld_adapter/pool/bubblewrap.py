"""The command prefix that starts the world server in namespaces of its own, where bubblewrap works."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import loop_plumbing
from agent_environments.sandbox import SANDBOX_FOLDER
from agent_environments.sandbox.box import system_arguments
from appworld_adapter.pool.run_folder import WorldFolder

WORKER_FOLDER = Path(__file__).resolve().parents[1] / "worker"
PLUMBING_FOLDER = Path(loop_plumbing.__file__).resolve().parent
INSTALL = "apt-get install bubblewrap (Debian, Ubuntu) or dnf install bubblewrap (Fedora, RHEL) on this machine"


async def bubblewrap_prefix(python: str, run_folder: WorldFolder) -> list[str]:
    """Return the arguments that precede the server's command and run it in bubblewrap.

    Inside, the server sees Python, the code of worker, sandbox and plumbing, and the run folder without the grader's
    folder. It has its own process ids, network and IPC, and no environment variables but its own.

    Raises:
        OSError: bubblewrap is missing or fails; the message names the cure.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise OSError(f"bubblewrap is not installed: {INSTALL}")
    prefixes = await _output_of(python, "-c", "import sys; print(sys.prefix); print(sys.base_prefix)")
    prefix = _arguments(program, prefixes.splitlines(), run_folder.path, hidden=[run_folder.grader])
    data = str(run_folder.dataset)
    try:
        exists = await _output_of(*prefix, python, "-c", "import os, sys; print(os.path.exists(sys.argv[1]))", data)
    except OSError as error:
        raise OSError(
            f"bubblewrap does not work here ({error}): allow user namespaces (Ubuntu from 24.04: "
            "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`), and try "
            "`bwrap --unshare-all --ro-bind / / true`"
        ) from error
    if exists.strip() != "False":
        raise OSError(f"bubblewrap would show the dataset: move it out of /usr and Python's folders, it is at {data}")
    return prefix


def _arguments(program: str, python_folders: list[str], run_folder: Path, hidden: Sequence[Path] = ()) -> list[str]:
    folders = [*python_folders, str(WORKER_FOLDER), str(SANDBOX_FOLDER), str(PLUMBING_FOLDER)]
    prefix = [program, "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    prefix += system_arguments(["/usr", *(path for path in folders if not path.startswith("/usr/"))])
    prefix += ["--bind", str(run_folder), str(run_folder)]
    for folder in hidden:
        prefix += ["--tmpfs", str(folder)]
    return [*prefix, "--chdir", str(run_folder)]


async def _output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 30.0)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise OSError(f"{command[0]}: {err.decode(errors='replace').strip()}")
    return out.decode()
