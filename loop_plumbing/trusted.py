"""Decides which modules a file of a run may have imported: a file is data, and names no code by itself.

Trusted are the modules that this process's own config names (:func:`trust_module`), and those that the reader names in
the environment variable :data:`VARIABLE`. Each caller decides about the modules of the project itself.
"""

from __future__ import annotations

import os

VARIABLE = "LOOP_TRUST"
"""Names of modules, separated by commas: ``LOOP_TRUST=my_env,my_losses``."""
_named: set[str] = set()


def trust_module(name: str) -> None:
    """Trust the package of a module, or of a part of a module, that this process's own config names."""
    _named.add(_package(name))


def is_trusted(name: str) -> bool:
    """Return whether the package of ``name`` is one that the config or the reader has named."""
    return _package(name) in {*_named, *map(_package, os.environ.get(VARIABLE, "").split(","))} - {""}


def _package(name: str) -> str:
    return name.strip().partition(":")[0].partition(".")[0]
