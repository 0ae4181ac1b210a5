"""The command prefix that starts the world server in namespaces of its own, where bubblewrap works."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

from appworld_adapter.pool.fork_client import WORKER_FOLDER

logger = logging.getLogger(__name__)


async def bubblewrap_prefix(python: str, run_folder: Path, dataset_root: Path) -> list[str]:
    """Arguments to put before the server's command, or [] where bubblewrap is missing or not allowed (which is logged).

    Inside there are Python, the worker's code, the run folder, and of the dataset the API docs and base databases; its
    own process ids, network, IPC; no environment but the server's.
    """
    program = shutil.which("bwrap")
    if program is None:
        return []
    prefixes = await _output_of(python, "-c", "import sys; print(sys.prefix); print(sys.base_prefix)")
    prefix = _arguments(program, prefixes.split("\n"), run_folder, dataset_root)
    try:
        await _output_of(*prefix, python, "-c", "pass")
    except OSError as error:
        logger.info("bubblewrap does not work here: %s", error)
        return []
    return prefix


def _arguments(program: str, python_folders: list[str], run_folder: Path, dataset_root: Path) -> list[str]:
    data = dataset_root.resolve() / "data"
    shown = [*filter(None, python_folders), str(WORKER_FOLDER), str(data / "api_docs"), str(data / "base_dbs")]
    prefix = [program, "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for system in ("/usr", "/lib", "/lib64", "/bin"):
        if os.path.islink(system):
            prefix += ["--symlink", os.readlink(system), system]
        elif os.path.isdir(system):
            prefix += ["--ro-bind", system, system]
    for path in shown:
        if not path.startswith("/usr/"):
            prefix += ["--ro-bind", path, path]
    return [*prefix, "--bind", str(run_folder), str(run_folder), "--chdir", str(run_folder)]


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
