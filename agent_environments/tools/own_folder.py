"""A user's file as a module, which alone can import its neighbours, the modules beside it.

For a script, Python puts its folder in front of the search path. There a neighbour ``email.py`` replaces the standard
library's module for every package that is imported later, and the ``helper.py`` of one file replaces another's. Here a
neighbour is found while its own file is imported, and it never takes the place of the standard library.

The file's own module is a submodule of this one, so that processes which a tool starts anew (``spawn``,
``forkserver``) find it: they get the name of a function and of its module, and import that.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # by which Python takes it for a package
FOLDER = "LOOP_FOLDER_OF_TOOLS"
"""The variable that names the folder of a process's only file, for the processes that it starts."""


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compile a file anew at each import.

    Python matches bytecode to its source by the time of writing, in seconds, and by the size. It would run old code of
    a grader that was mended within the same second without a change in length.
    """

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError("bytecode is neither read nor written")


def spec_of(file: Path) -> importlib.machinery.ModuleSpec:
    """Return the import spec of a user's file, whose name ends in .py."""
    name = f"{__name__}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromSource(name, str(file)))
    assert spec is not None, "the name ends in .py"
    return spec


class _Neighbours:
    """Find a folder's modules and packages; a package without ``__init__.py`` only if nothing else has its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        own = Path(self._folder, f"{name.removeprefix(__name__ + '.')}.py")
        if path is __path__ and own.is_file():
            return spec_of(own)
        if path is not None or name in sys.stdlib_module_names:
            return None
        find = importlib.machinery.PathFinder.find_spec
        spec = find(name, [self._folder])
        if spec is not None and spec.loader is None and (other := find(name)) is not None and other.loader is not None:
            return None
        return spec


@contextlib.contextmanager
def neighbours_of(file: Path, stay: bool = False) -> Iterator[None]:
    """Let modules beside ``file`` be imported within the block; at its end these modules are forgotten.

    Args:
        stay: whether the modules stay importable, in a process that serves only this file. The file's functions, and
            the processes that they start, may then import the modules later.
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
    for name in others:  # modules of another file's folder, or installed ones, are not meant by the name
        del sys.modules[name]
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()  # for files that were written just now
    if stay:
        os.environ[FOLDER] = str(folder)
        sys.path.append(str(folder))  # which multiprocessing hands on
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


if FOLDER in os.environ:  # started by a file's own process, it is to import the file, or its neighbours
    sys.meta_path.insert(0, _Neighbours(Path(os.environ[FOLDER])))
