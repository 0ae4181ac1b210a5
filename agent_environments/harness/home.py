"""The home that an episode's program has of its own: its keys, settings and sessions stay apart from others'.

Agents write a key, a login or a session into their home and read it again later. Two agents in one home played with
each other's key.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

HOME, TEMPORARY = "home", "tmp"
XDG = {
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
    "XDG_CACHE_HOME": ".cache",
    "XDG_RUNTIME_DIR": ".run",
    "PIP_CACHE_DIR": ".cache/pip",
    "UV_CACHE_DIR": ".cache/uv",
    "NPM_CONFIG_CACHE": ".cache/npm",
    "NPM_CONFIG_PREFIX": ".npm-global",
    "PYTHONUSERBASE": ".local",
    "HF_MODULES_CACHE": ".cache/huggingface/modules",
}
"""Folders of a home by the variables that name them, with those of caches and installed programs: the node may have
them elsewhere."""
INSTALLED = {"PYENV_ROOT": ".pyenv", "RUSTUP_HOME": ".rustup", "VOLTA_HOME": ".volta"}
"""Folders in which a user's installed programs find themselves: they stay in the node's home."""


def make_home(folder: Path, template: Path | None) -> None:
    """Make a home in ``folder``, filled from ``template``, and a folder for temporary files."""
    home = folder / HOME
    if template is None:
        home.mkdir(mode=0o700)
    else:
        copy_tree(template, home)
    for place in (folder / TEMPORARY, *(home / below for below in XDG.values())):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for packages in _user_base().glob("lib/python*/site-packages"):
        own = home / XDG["PYTHONUSERBASE"] / packages.relative_to(_user_base())
        own.mkdir(parents=True, exist_ok=True)
        (own / "of_the_node.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n", encoding="utf-8")


def _user_base() -> Path:
    """Return the folder of packages that the node's user has installed; programs may import from it but add nothing."""
    return Path(os.environ.get("PYTHONUSERBASE") or os.path.join(os.environ.get("HOME") or "/nonexistent", ".local"))


def copy_tree(source: Path, folder: Path, within: Sequence[Path] = ()) -> None:
    """Copy a tree into ``folder``; writing to the copy never changes the tree or the targets of its links.

    A link that leads out of the tree becomes a copy of its target. A link that leads nowhere is left out. Other links
    stay links.

    Args:
        within: the trees whose links led to ``source``; they are not copied again.
    """
    roots = (*within, source.resolve())
    shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
    for at, folders, files in os.walk(source):
        for link in filter(os.path.islink, (Path(at, name) for name in (*folders, *files))):
            copied, target = folder / link.relative_to(source), Path(os.path.realpath(link))
            text, inside = os.readlink(link), target.is_relative_to(roots[-1])
            if inside and not os.path.isabs(text) and Path(os.path.normpath(link.parent / text)).is_relative_to(source):
                continue
            copied.unlink()
            if inside:
                copied.symlink_to(os.path.relpath(target, link.parent.resolve()))
            elif target.is_file():
                shutil.copy2(target, copied)
            elif target.is_dir() and not any(root.is_relative_to(target) for root in roots):
                copy_tree(target, copied, roots)


def home_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables that point a program to the home that :func:`make_home` made in ``folder``."""
    home, temporary = folder / HOME, str(folder / TEMPORARY)
    usual = os.environ.get("HOME", "")
    installed = {
        name: os.path.join(usual, below)
        for name, below in INSTALLED.items()
        if usual and name not in os.environ and os.path.isdir(os.path.join(usual, below))
    }
    return {
        **installed,
        **{name: str(home / below) for name, below in XDG.items()},
        "HOME": str(home),
        **dict.fromkeys(("TMPDIR", "TMP", "TEMP"), temporary),
    }
