"""The home that an episode's program has of its own: what it keeps of keys, settings and sessions is no other's.

Agents write into their home what they then read again: a key, a login, the session to go on from. Two that shared one
played with each other's key.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
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
}
"""Folders of a home by the variables that name them, caches among them that the node may have elsewhere."""
INSTALLED = {"PYTHONUSERBASE": ".local", "PYENV_ROOT": ".pyenv", "RUSTUP_HOME": ".rustup", "VOLTA_HOME": ".volta"}
"""Where programs that a user has installed look for themselves: that is still the node's home."""
MARKS = {"PYTHONUSERBASE": ".local/lib"}


def make_home(folder: Path, template: Path | None) -> None:
    """Make a home in ``folder``, filled from ``template``, and a folder for temporary files."""
    home = folder / HOME
    if template is None:
        home.mkdir(mode=0o700)
    else:
        shutil.copytree(template, home, symlinks=True)
    for place in (folder / TEMPORARY, *(home / below for below in XDG.values())):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)


def home_variables(folder: Path) -> dict[str, str]:
    """The variables by which a program finds the home that :func:`make_home` has made in ``folder``."""
    home, temporary = folder / HOME, str(folder / TEMPORARY)
    usual = os.environ.get("HOME", "")
    installed = {
        name: os.path.join(usual, below)
        for name, below in INSTALLED.items()
        if usual and name not in os.environ and os.path.isdir(os.path.join(usual, MARKS.get(name, below)))
    }
    return {
        **installed,
        **{name: str(home / below) for name, below in XDG.items()},
        "HOME": str(home),
        **dict.fromkeys(("TMPDIR", "TMP", "TEMP"), temporary),
    }


def remove_home(folder: Path) -> None:
    """Remove ``folder`` with all that is in it, read-only folders too; what cannot be removed stays."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            below = os.path.join(path, name)
            if not os.path.islink(below):
                with contextlib.suppress(OSError):
                    os.chmod(below, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
