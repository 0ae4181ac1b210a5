"""Lets a user's file import its neighbours, the modules beside it, and nobody else.

Python does so for a script by putting its folder in front of the search path, where a neighbour ``email.py`` takes the
place of the standard library's for every package that is imported later, and a ``helper.py`` of one file that of
another. Here a neighbour is found while its own file is imported, and it never takes the place of the standard library.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType


class _Neighbours:
    """Finds the modules and packages of a folder; one without ``__init__.py`` only if nothing else has its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or name in sys.stdlib_module_names:
            return None
        find = importlib.machinery.PathFinder.find_spec
        spec = find(name, [self._folder])
        if spec is not None and spec.loader is None and (other := find(name)) is not None and other.loader is not None:
            return None
        return spec


@contextlib.contextmanager
def neighbours_of(file: Path, stay: bool = False) -> Iterator[None]:
    """While it is open, the neighbours of ``file`` can be imported; its modules are forgotten at the end.

    Args:
        stay: for good, in a process that serves this file alone: its functions may import them when they are called.
    """
    folder = file.parent
    finder = _Neighbours(folder)
    names = {path.stem for path in folder.iterdir()} - sys.stdlib_module_names
    taken = {name for name in names & set(sys.modules) if finder.find_spec(name, None) is not None}
    others = {
        name: module
        for name, module in sys.modules.items()
        if name.split(".")[0] in taken and not _lies_in(module, folder)
    }
    for name in others:  # of another file's folder, or installed: not what this file means by the name
        del sys.modules[name]
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()  # for files that were written just now
    try:
        yield
    finally:
        if not stay:
            sys.meta_path.remove(finder)
            for name in set(sys.modules) - before:
                if name.split(".")[0] in names and _lies_in(sys.modules[name], folder):
                    del sys.modules[name]
            sys.modules.update(others)


def _lies_in(module: ModuleType, folder: Path) -> bool:
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(Path(place).resolve().is_relative_to(folder) for place in places if place)
