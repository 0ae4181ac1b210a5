"""Tells whether two files of functions grade the same tasks in the same way: digests of their code and tasks."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loop_plumbing.breakage import raised_as

_INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def identity(module: str, tasks: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return digests (16 hexadecimal digits) of the code and the tasks on which an environment's scores depend.

    Args:
        module: path of a Python file, or a dotted module path, as a config names it.
        tasks: all tasks; their order does not matter.

    Returns:
        ``code``: the digest of the module's file and of the files that it imports from its own folder;
        ``tasks``: the digest of the tasks, every field included.

    Raises:
        ValueError: the module does not exist.
    """
    return {"code": code_digest(module), "tasks": tasks_digest(tasks, f"{_place_of(module)[1]}/")}


def code_digest(module: str) -> str:
    """Return one digest of a module's file and the files beside it that it imports, wherever their folder lies.

    All files of an imported package count. For an installed module, only its own package counts. A
    changed comment changes the digest.

    Raises:
        ValueError: the module does not exist.
    """
    file, folder, own = _place_of(module)
    digests: dict[str, str] = {}
    waiting = [file]
    while waiting:
        at = waiting.pop()
        name = "" if at == file else str(at.relative_to(folder))
        if name in digests:
            continue
        source = at.read_bytes()
        digests[name] = hashlib.sha256(source).hexdigest()
        for imported in own if folder in _INSTALLED else own | _imports(source):
            waiting += [*folder.glob(f"{imported}.py"), *(folder / imported).rglob("*.py")]
    return digest(sorted(digests.items()))


def _imports(source: bytes) -> set[str]:
    """Return the modules and packages that some code imports by absolute names, also within functions."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a neighbour for another Python, whose import is guarded
        return set()
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def _place_of(module: str) -> tuple[Path, Path, set[str]]:
    """Return a module's file, the folder in which its imports are searched, and its package, if any."""
    if module.endswith(".py"):
        file = Path(module).resolve()
        return file, file.parent, set()
    with raised_as(ValueError, f"module {module} cannot be found: ", ImportError, ValueError):
        spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"module {module} has no file of Python code")
    file = Path(spec.origin).resolve()
    names = module.split(".")
    return file, file.parents[len(names) - (file.name != "__init__.py")], {names[0]}


def tasks_digest(tasks: Iterable[Mapping[str, Any]], folder: str = "") -> str:
    """Return a digest of some tasks that does not depend on their order. If the tasks name files in ``folder`` (given
    with a ``/`` at its end), the digest does not depend on where the folder lies."""
    texts = [json.dumps(plain(task, ())) for task in tasks]
    here = json.dumps(folder)[1:-1]
    return digest(sorted(text.replace(here, "./") if here else text for text in texts))


def digest(data: object) -> str:
    """Return the digest of data that JSON can hold."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def plain(value: Any, within: tuple[int, ...]) -> Any:
    """Convert any value to JSON types; equal values in different processes give the same result.

    Args:
        within: ids of the objects that hold the value, so that an object that holds itself does not recurse for ever.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if id(value) in within:
        return [kind, "..."]
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return [
            "mapping",
            *sorted(json.dumps([plain(key, within), plain(each, within)]) for key, each in value.items()),
        ]
    if isinstance(value, list | tuple):
        return [plain(each, within) for each in value]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(json.dumps(plain(each, within)) for each in value)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return [kind, f"{value.__module__}.{value.__qualname__}"]
    if callable(to_list := getattr(value, "tolist", None)):  # numpy's, and torch's
        return [kind, str(getattr(value, "dtype", "")), plain(to_list(), within)]
    if type(value).__repr__ is not object.__repr__ and f"0x{id(value):x}" not in (text := repr(value)):
        return [kind, text]
    return [kind, plain(getattr(value, "__dict__", None), within)]
