"""Interpreters with other people's packages, for drills that compare with the packages themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MAKING_S = 900.0


def with_packages(variable: str, *packages: str) -> str:
    """Return the interpreter that the environment variable names, else one with these packages, which is made once, in
    ``build/interpreters``, by the uv of ``make setup``.

    Raises:
        CalledProcessError, TimeoutExpired: uv cannot make it, as without the package index.
    """
    if named := os.environ.get(variable):
        return named
    folder = REPOSITORY / "build" / "interpreters" / packages[0]
    python, done = folder / "bin" / "python", folder / "done"
    if not done.exists():
        beside = (REPOSITORY / ".uv" / "bin" / "uv", Path(sys.executable).with_name("uv"))
        uv = next((str(each) for each in beside if each.exists()), "uv")
        for command in (
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", str(python), *packages],
        ):
            subprocess.run(command, check=True, timeout=MAKING_S)
        done.touch()
    return str(python)
