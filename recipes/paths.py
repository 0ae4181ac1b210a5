"""OmegaConf resolvers for the paths in our YAMLs, so that a config names no machine and no working folder.

``${loop_home:}`` is where worlds, environments and runs live: ``$LOOP_HOME``, else the checkout this package was
installed from in editable mode, else the current folder. ``${loop_package:tiny_policy}`` is a folder inside the
installed package. Importing this module registers both.
"""

import os
from pathlib import Path

from omegaconf import OmegaConf

_PACKAGE = Path(__file__).resolve().parent


def loop_home() -> Path:
    """The folder that holds ``worlds/``, ``.venv-appworld/`` and ``runs/``."""
    if os.environ.get("LOOP_HOME"):
        return Path(os.environ["LOOP_HOME"]).expanduser().resolve()
    checkout = _PACKAGE.parent
    return checkout if (checkout / "pyproject.toml").exists() else Path.cwd()


def loop_package(relative: str) -> Path:
    """A file or folder shipped inside the installed ``loop_recipes`` package."""
    return _PACKAGE / relative


OmegaConf.register_resolver("loop_home", lambda: str(loop_home()), replace=True)
OmegaConf.register_resolver("loop_package", lambda relative: str(loop_package(relative)), replace=True)
