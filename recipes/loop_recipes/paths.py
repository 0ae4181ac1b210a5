"""The places of files: the recipes and their configs, the files of this package, and the user's worlds and runs.

Imports nothing but the standard library, because :mod:`loop_recipes.registration` runs in every program that imports
torch.
"""

import os
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
"""In a run's folder: what :mod:`loop_recipes.run.metrics` writes and reads."""

_PACKAGE = Path(__file__).resolve().parent


def recipes_folder() -> Path:
    """The folder of the recipe files and ``configs/``.

    In a checkout this package lies inside it. A wheel carries it inside this package: torchtune's own wheel has a
    top-level package called ``recipes``, which another of that name would overwrite.
    """
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parent


def loop_home() -> Path:
    """The folder that holds ``worlds/``, ``.venv-appworld/`` and ``runs/``."""
    if os.environ.get("LOOP_HOME"):
        return Path(os.environ["LOOP_HOME"]).expanduser().resolve()
    checkout = _PACKAGE.parents[1]
    return checkout if (checkout / "pyproject.toml").exists() else Path.cwd()


def loop_package(relative: str) -> Path:
    """A file or folder shipped inside the installed ``loop_recipes`` package."""
    return _PACKAGE / relative
