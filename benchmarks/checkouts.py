"""This checkout and an earlier one, side by side: the earlier one's work tree, and a child process under either."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CHILD_SECONDS = 900.0


@contextmanager
def base_checkout(base: str, folder: Path) -> Iterator[Path]:
    """Yield the folder of BASE: as given, or a work tree of the commit that is removed in the end."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    git = ["git", "-C", str(HERE), "worktree"]
    made = subprocess.run([*git, "add", "--detach", str(folder), base], capture_output=True, text=True)
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["?"])[-1]
        sys.exit(f"{Path(sys.argv[0]).stem}: {base} is neither a folder nor a commit: {reason}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def run_checkout(checkout: Path, script: str, words: Sequence[str], folder: Path, log: Path) -> str | None:
    """Run ``script`` of this checkout in a child in ``folder``, with the packages of ``checkout``.

    Returns:
        The reason of a failure, with the last lines of ``log``; None without one.
    """
    path = os.pathsep.join(str(checkout / name) for name in (".", "recipes", "contrib"))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, str(checkout), "--checkout", str(checkout), *words]
    with open(log, "w+") as file:
        try:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file, timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            return f"not done after {CHILD_SECONDS:.0f} s"
        file.seek(0)
        lines = file.read().strip().splitlines()
        return "\n".join([f"ended with {done.returncode}", *lines[-15:]]) if done.returncode else None


def hide_installed_checkout() -> None:
    """Import from the path alone; called in the child before anything of a checkout is imported.

    An editable install of another checkout has a finder of its own, which would answer for what this one lacks.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
    sys.path[:] = [folder for folder in sys.path if folder and Path(folder).resolve() != HERE / "benchmarks"]


def check_imported(checkout: Path, more: Collection[str] = ()) -> None:
    """Check that each package of ours, and each of the modules ``more``, was imported from ``checkout``."""
    packages = [file for place in (".", "recipes", "contrib") for file in (checkout / place).glob("*/__init__.py")]
    ours = {file.parent.name for file in packages} | {*more}
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if file is not None and name.partition(".")[0] in ours:
            assert Path(file).is_relative_to(checkout), f"{name} came from {file}, not from {checkout}"
