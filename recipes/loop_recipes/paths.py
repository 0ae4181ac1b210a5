"""The places of files: the recipes, their configs, and the files of this package.

Imports little more than the standard library, because :mod:`loop_recipes.registration` runs in every program that
imports torch.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from loop_plumbing.plug_ins import folders

RECIPES = {
    "loop_appworld": "train",
    "sft_appworld": "sft",
    "eval_appworld": "eval",
    "warm_start_appworld": "warm_start",
}
"""A recipe -> its verb of ``loop``, which is also its section in a config and its folder in ``configs/``."""
KINDS = ("machine", "world", "preset", "algorithm")
"""Kinds of files that a config is made of, from the lowest to the highest; each has a folder in ``configs/``."""
TYPED = "LOOP_TYPED_COMMAND"
"""The variable with the typed verb of ``loop``, for a recipe and the processes that it starts."""
_PACKAGE = Path(__file__).resolve().parent


def typed(recipe: str) -> str:
    """Return the beginning of lines for the terminal: the typed verb, or the recipe's name under `tune run`."""
    return os.environ.get(TYPED, recipe)


def recipes_folder() -> Path:
    """Return the folder of the recipe files and ``configs/``.

    In a checkout, this package lies inside that folder. In a wheel, the folder lies inside this package: torchtune's
    wheel has a top-level package ``recipes``, and a second one would overwrite it.
    """
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parent


def loop_package(relative: str) -> Path:
    """Return a file or folder shipped inside the installed ``loop_recipes`` package."""
    return _PACKAGE / relative


@functools.cache
def config_files(recipe: str = "loop_appworld") -> Mapping[str, Mapping[str, Path]]:
    """Return kind -> name -> shipped file; the kind ``machine`` holds the configs that run by themselves with
    ``recipe``. Installed packages add the files of their folder ``configs``, but replace none of ours.
    """
    own: dict[str, Path] = {}
    known: dict[str, dict[str, Path]] = {kind: {} for kind in KINDS}
    for place in (recipes_folder() / "configs", *(added / "configs" for added in folders("configs"))):
        for kind in KINDS:
            known[kind] |= {path.stem: path for path in place.glob(f"{kind}s/*.yaml") if path.stem not in known[kind]}
        mine = sorted(place.glob(f"{RECIPES[recipe]}/*.yaml"))
        own |= {path.stem: path for path in mine if path.stem != "base" and path.stem not in own}
    known = {kind: dict(sorted(files.items())) for kind, files in known.items()}
    known["machine"] = own if recipe == "warm_start_appworld" else {**known["machine"], **own}
    return known
