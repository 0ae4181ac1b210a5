"""The commands that make an AppWorld interpreter and a dataset, as error messages name them.

A checkout has a Makefile, whose targets are short. An installed wheel has none, and gets whole commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

APPWORLD = "appworld==0.1.3.post1"
_WORKER = Path(__file__).resolve().parent / "worker"
_IN_CHECKOUT = (_WORKER.parents[1] / "Makefile").is_file()


def interpreter_command(python: str | Path) -> str:
    """Return the command that makes the interpreter ``python``, in backticks."""
    if _IN_CHECKOUT:
        return "`make setup`"
    folder = Path(python).absolute().parent
    if folder.name != "bin":
        return f"`pip install {APPWORLD} && appworld install` in an environment of its own"
    return f"`{sys.executable} -m venv {folder.parent} && {folder}/pip install {APPWORLD} && {folder}/appworld install`"


def dataset_commands(root: str | Path) -> str:
    """Return the commands that write the synthetic and real datasets to ``root``, in backticks with their effect."""
    if _IN_CHECKOUT:
        return "`make world` writes the synthetic one, `make appworld-data` downloads the real one"
    python = ".venv-appworld/bin/python"
    return (
        f"`{python} {_WORKER}/synthetic/generate.py --root {root}` writes the synthetic one, "
        f"`{python} {_WORKER}/fetch_data.py --root {root}` downloads the real one"
    )
