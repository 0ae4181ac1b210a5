"""Finds the plug-ins of installed packages, by the entry points in their metadata.

A package adds an environment by a line of its own, and the project has no line for it::

    [project.entry-points."torchtune_loop.environments"]
    maze = "my_mazes.pool:MazePool"

The groups are :data:`GROUPS`: whole agents, counters of behaviour, packages with a folder ``configs``, demonstrators of
an environment, dialects of the endpoint, environments, parts that a key of a config asks for, and verbs of ``loop``.
The project's own ``contrib``, the distribution ``torchtune-loop-contrib``, comes in by the same doors.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PREFIX = "torchtune_loop."
GROUPS = ("agents", "behavior", "configs", "demonstrators", "dialects", "environments", "parts", "verbs")


@cache
def plug_ins(group: str) -> Mapping[str, str]:
    """Return name -> ``module:attribute`` (or a module) for all plug-ins of a group, without importing them.

    Args:
        group: one of :data:`GROUPS`.
    """
    return {point.name: point.value for point in importlib.metadata.entry_points(group=PREFIX + group)}


def load(target: str) -> Any:
    """Import ``module:attribute``.

    Raises:
        ImportError, AttributeError: the module does not exist, or lacks the attribute.
    """
    return importlib.metadata.EntryPoint(name="", value=target, group="").load()


def load_part(name: str) -> Any:
    """Import an optional part, such as a judge, that a config key or an option asks for and that is not in the core.

    Raises:
        ValueError: no installed package has the part, or its import fails; the message says which.
    """
    target = plug_ins("parts").get(name)
    if target is None:
        raise ValueError(f"{name}: no installed package has this part (torchtune-loop-contrib does)")
    try:
        return load(target)
    except ImportError as error:
        raise ValueError(f"{name}: {target} cannot be imported: {error}") from error


@cache
def packages() -> frozenset[str]:
    """Return the top packages that have plug-ins; by installing them the user agreed to run their code."""
    targets = (target for group in GROUPS for target in plug_ins(group).values())
    return frozenset(target.partition(":")[0].partition(".")[0] for target in targets)


def folders(group: str) -> list[Path]:
    """Return the existing folders of the packages that a group names, in the order of the packages' names."""
    specs = (importlib.util.find_spec(package) for _, package in sorted(plug_ins(group).items()))
    return [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
